"""Settings: complete, frozen, and mistakes told in words."""

import doctest
from pathlib import Path

import pytest

import probprompt.config
from probprompt.config import apply_assignments, apply_values, merge, parse_config, read_toml, with_absolute_paths
from probprompt.errors import UserError
from probprompt.methods import find, registered
from probprompt.methods.probprompt import ProbPromptConfig


def test_doctests() -> None:
    assert doctest.testmod(probprompt.config).failed == 0


def test_the_papers_reading_is_the_default() -> None:
    config = parse_config({})
    method = config.method
    assert isinstance(method, ProbPromptConfig)
    assert (method.blocks, method.tokens, method.components, method.samples) == ((0, 1, 2, 3, 4), 8, 10, 30)
    assert (method.relevance_temperature, method.initial_mean, method.initial_std) == (1.0, "uniform", 1.0)
    assert (method.regularisation, method.reference, method.evaluation) == (1e-6, "step", "sample")
    assert (method.aggregation, method.variant, method.top_k) == ("cosine", "mixture", None)
    training = config.training
    assert (training.epochs, training.batch, training.head_rate, training.prompt_rate_factor) == (20, 128, 0.0025, 5)
    assert (training.adapt_tasks, training.clip, training.augmentation) == (None, None, "crop")
    assert config.head.kind is None and find(method.name).preferred_head == "linear"
    assert config.alignment.enabled is None and find(method.name).aligned
    assert config.backbone.normalisation == "backbone" and config.data.interpolation == "bilinear"
    assert config.preset is None and method.marks() == ()


def test_a_config_survives_json() -> None:
    config = parse_config({"method": {"name": "probprompt", "samples": 5}, "data": {"tasks": [["a", "b"], ["c"]]}})
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("epoch=3", "could be|training.epochs|alignment.epochs"),
        ("trainin.epochs=3", "did you mean 'training.epochs'"),
        ("sampels=3", "did you mean 'method.samples'"),
        ("epochs=3", "could be training.epochs or alignment.epochs"),
        ("method.nonsense=3", "no setting is called"),
        ("samples", "key=value"),
    ],
)
def test_a_wrong_name_gets_the_nearest(assignment: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        apply_assignments({}, [assignment])


@pytest.mark.parametrize(
    "assignment",
    [
        "training.epochs=0",
        "training.epochs=many",
        "tokens=7",
        "top_k=11",
        "initial_std=-1",
        "relevance_temperature=big",
        "blocks=[1, 1]",
        "variant=other",
        "training.batch=2.5",
        "training.clip=0",
        "training.adapt_tasks=-1",
        "training.augmentation=flip",
        "training.schedule=linear",
    ],
)
def test_a_wrong_value_is_refused_by_name(assignment: str) -> None:
    with pytest.raises(UserError, match=r"method|training"):
        parse_config(apply_assignments({}, [assignment]))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("kind=cubic", "head.kind: Input should be 'linear', 'normalised', 'ridge', 'lda' or 'nearest-mean'"),
        ("ridge=0", "head.ridge: Input should be greater than 0, not 0"),
        ("ridge=inf", "head.ridge: Input should be a finite number"),
        ("shrinkage=2", "head.shrinkage: "),
        ("projections=-1", "head.projections: "),
        ("centroids=0", "alignment.centroids: "),
        ("optimiser=adam", "alignment.optimiser: Input should be 'adamw' or 'sgd'"),
        ("interpolation=nearest", "data.interpolation: Input should be 'bilinear' or 'bicubic'"),
        ("normalisation=imagenet", "backbone.normalisation: Input should be 'backbone', 'unit' or 'cifar100'"),
    ],
)
def test_a_wrong_value_of_head_alignment_or_input_is_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        parse_config(apply_assignments({}, [assignment]))
    assert message in str(told.value)


def test_settings_of_the_head_go_to_the_head() -> None:
    config = parse_config(
        apply_assignments({}, ["kind=ridge", "projections=7", "ridge=0.5", "adapt_tasks=2", "clip=1"])
    )
    assert (config.head.kind, config.head.projections, config.head.ridge) == ("ridge", 7, 0.5)
    assert (config.training.adapt_tasks, config.training.clip) == (2, 1.0)
    with pytest.raises(UserError, match=r"'schedule' could be training\.schedule or alignment\.schedule"):
        apply_assignments({}, ["schedule=vq"])


def test_names_are_those_of_the_chosen_method() -> None:
    config = parse_config(apply_assignments({"method": "l2p"}, ["top_k=2", "pull=0.3"]))
    assert config.method.model_dump()["pull"] == 0.3
    nested = parse_config({"method": {"name": "hide-prompt", "identity_alignment": {"epochs": 3}}})
    assert nested.method.model_dump()["identity_alignment"]["epochs"] == 3
    with pytest.raises(UserError, match="no setting is called 'samples'"):
        apply_assignments({"method": "l2p"}, ["samples=3"])


def test_a_published_mistake_is_marked_only_where_it_was_asked_for() -> None:
    for name in registered():
        assert parse_config({"method": name}).method.marks() == ()
    (mark,) = parse_config({"method": {"name": "l2p", "batchwise": True}}).method.marks()
    assert mark.startswith("batchwise: ")


def test_unknown_keys_and_methods_are_refused() -> None:
    with pytest.raises(UserError, match="no method is called 'probpromt': did you mean 'probprompt'"):
        parse_config({"method": "probpromt"})
    with pytest.raises(UserError, match=r"no setting is called 'training\.epoch': did you mean 'training\.epochs'"):
        parse_config({"training": {"epoch": 3}})


def test_a_table_in_place_of_a_value_is_refused() -> None:
    with pytest.raises(UserError, match="training"):
        parse_config({"training": 3})
    with pytest.raises(UserError, match="method"):
        parse_config({"method": 3})


def test_values_may_be_none_numbers_lists_or_words() -> None:
    settings = apply_assignments({}, ["top_k=none", "blocks=[0, 2]", "reference=task", "tasks=4,4,2"])
    assert settings["method"] == {"top_k": None, "blocks": [0, 2], "reference": "task"}
    assert settings["data"] == {"tasks": "4,4,2"}


def test_naming_another_method_drops_the_first_ones_settings() -> None:
    merged = merge({"method": {"name": "probprompt", "samples": 3}}, {"method": "linear-probe"})
    assert merged["method"] == {"name": "linear-probe"}
    assert merge({"method": {"samples": 3}}, {"method": {"name": "probprompt"}})["method"]["samples"] == 3
    assert apply_values({"method": "linear-probe"}, {"head_rate": 0.1})["training"] == {"head_rate": 0.1}


def test_toml(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[training]\nepochs = 3\n[method]\nname = 'probprompt'\nsamples = 4\n")
    assert parse_config(read_toml(tmp_path / "a.toml")).training.epochs == 3
    (tmp_path / "b.toml").write_text("[training\n")
    for name, hint in (("b.toml", "not valid TOML"), ("c.toml", "cannot be read")):
        with pytest.raises(UserError, match=hint):
            read_toml(tmp_path / name)


def test_mistakes_are_told_once_and_in_words() -> None:
    for assignment, message in (
        ("tasks=[1.5]", "data.tasks: must be a number of tasks, sizes such as [4, 4, 2] or lists of class names"),
        ("blocks=[0, 0]", "blocks must be different and at least one, not (0, 0)"),
        ("head_rate=1e300", "training.head_rate: Input should be less than or equal to 1"),
    ):
        with pytest.raises(UserError) as told:
            parse_config(apply_assignments({}, [assignment]))
        assert message in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(UserError, match=r"'training\.epochs' or 'alignment\.epochs'"):
        apply_assignments({}, ["epoch=3"])


def test_paths_are_written_out_but_names_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "emoji-r"):
        (tmp_path / name).mkdir()
    for given, written in (("photos", str(tmp_path / "photos")), ("emoji-r", "emoji-r"), ("nowhere", "nowhere")):
        assert with_absolute_paths(parse_config({"data": {"benchmark": given}})).data.benchmark == written
