"""Settings: complete, frozen, and errors that name the setting."""

import re
from pathlib import Path
from typing import Any

import pytest

from probprompt.config import (
    STORED_NAMES,
    RunConfig,
    apply_assignments,
    apply_values,
    field_names,
    flatten,
    from_stored,
    merge,
    nest,
    parse_config,
    parse_stored,
    read_toml,
    with_absolute_paths,
)
from probprompt.errors import UserError
from probprompt.heads.closed_form import RidgeSettings
from probprompt.methods import find, registered
from probprompt.methods.probprompt import ProbPromptConfig


def test_defaults_follow_the_paper() -> None:
    config = parse_config({})
    method = config.method
    assert isinstance(method, ProbPromptConfig)
    assert (method.blocks, method.tokens, method.components, method.samples) == ((0, 1, 2, 3, 4), 8, 10, 30)
    assert (method.relevance_temperature, method.initial_mean, method.initial_std) == (1.0, "uniform", 1.0)
    assert (method.regularization, method.reference, method.evaluation) == (1e-6, "step", "sample")
    assert (method.aggregation, method.variant, method.top_k) == ("cosine", "mixture", None)
    training = config.training
    assert (training.epochs, training.batch_size, training.head_lr, training.prompt_lr_scale) == (20, 128, 0.0025, 5)
    assert (training.adapt_tasks, training.clip, training.augmentation) == (None, None, "crop")
    assert config.head.kind == find(method.name).preferred_head == "linear"
    assert config.alignment.enabled is None and find(method.name).aligned
    assert config.backbone.normalization == "backbone" and config.data.interpolation == "bilinear"
    assert config.preset is None and method.marks() == ()


def test_config_survives_json() -> None:
    config = parse_config({"method": {"name": "probprompt", "samples": 5}, "data": {"tasks": [["a", "b"], ["c"]]}})
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("epoch=3", r"'training\.epochs' or 'alignment\.epochs'"),
        ("trainin.epochs=3", r"'training\.epochs'"),
        ("sampels=3", r"'method\.samples'"),
        ("epochs=3", r"training\.epochs or alignment\.epochs"),
        ("schedule=vq", r"'schedule'.* training\.schedule or alignment\.schedule"),
        ("method.nonsense=3", "Unknown setting"),
        ("samples", "key=value"),
    ],
)
def test_wrong_names_get_the_nearest(assignment: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        apply_assignments({}, [assignment])


WRONG_VALUES = (
    "training.epochs=0 training.epochs=many training.batch_size=2.5 training.clip=0 training.adapt_tasks=-1 "
    "training.augmentation=flip training.schedule=linear training.head_lr=1e300 method.tokens=7 method.top_k=11 "
    "method.initial_std=-1 method.relevance_temperature=big method.blocks=[0,0] method.variant=other "
    "head.kind=cubic head.ridge=0 head.ridge=inf head.shrinkage=2 head.projections=-1 alignment.centroids=0 "
    "alignment.optimizer=adam data.interpolation=nearest data.tasks=[1.5] backbone.normalization=imagenet"
)


@pytest.mark.parametrize("assignment", WRONG_VALUES.split())
def test_wrong_values_are_refused_by_name(assignment: str) -> None:
    name = assignment.partition("=")[0].partition(".")[2]
    with pytest.raises(UserError) as error:
        parse_config(apply_assignments({}, [assignment]))
    assert all(name in line for line in str(error.value).splitlines())


def test_settings_of_the_head_and_the_method() -> None:
    given = "kind=ridge projections=7 ridge=0.5 adapt_tasks=2 clip=1"
    config = parse_config(apply_assignments({}, given.split()))
    assert isinstance(config.head, RidgeSettings) and (config.head.projections, config.head.ridge) == (7, 0.5)
    assert (config.training.adapt_tasks, config.training.clip) == (2, 1.0)
    config = parse_config(apply_assignments({"method": "l2p"}, ["top_k=2", "pull=0.3"]))
    assert config.method.model_dump()["pull"] == 0.3
    nested = parse_config({"method": {"name": "hide-prompt", "identity_alignment": {"epochs": 3}}})
    assert nested.method.model_dump()["identity_alignment"]["epochs"] == 3
    with pytest.raises(UserError, match="'samples'"):
        apply_assignments({"method": "l2p"}, ["samples=3"])


def test_old_names_in_files_are_read_and_written(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"training": {"augmentation": "crop+color"}, "evaluation_batch_size": 7}
    changed |= {"head": {"kind": "ridge", "intermediate": "unprojected", "flip_average": True}}
    config = parse_config(changed)
    stored, names = flatten(config.to_stored()), set(field_names(RunConfig, {}))
    assert parse_stored(config.to_stored()) == config and stored["training.augmentation"] == "crop+colour"
    assert (stored["head.readings"], stored["head.mirrored"], stored["evaluation_batch"]) == ("beside", True, 7)
    for method in registered():
        own = parse_config({"method": method})
        assert parse_stored(own.to_stored()) == own
        names |= {f"method.{name}" for name in flatten(own.method.model_dump())}
    assert names >= set(STORED_NAMES) and not names & set(STORED_NAMES.values())
    plug_in = {"method": {"name": "other", "quantise": 1}}
    assert from_stored(plug_in) == plug_in


@pytest.mark.parametrize("name", STORED_NAMES)
def test_old_name_given_by_a_user_is_an_error_with_the_new_one(name: str) -> None:
    method = "vq-prompt" if name.endswith("quantize") else "hide-prompt" if "identity" in name else "probprompt"
    for old in (STORED_NAMES[name], STORED_NAMES[name].rpartition(".")[2]):
        with pytest.raises(UserError, match=rf"Unknown setting '{re.escape(old)}'\. It is now .*'{re.escape(name)}'"):
            apply_values({"method": method}, {old: 1})
    with pytest.raises(UserError, match=f"now .*'{re.escape(name)}'|readings|mirror|follow"):
        parse_config(merge({"method": method}, nest({STORED_NAMES[name]: 1})))
    with pytest.raises(UserError, match=r"crop\+colour.*now 'crop\+color'"):
        parse_config({"training": {"augmentation": "crop+colour"}})


def test_published_mistakes_are_marked_only_on_request() -> None:
    for name in registered():
        assert parse_config({"method": name}).method.marks() == ()
    (mark,) = parse_config({"method": {"name": "l2p", "batchwise": True}}).method.marks()
    assert mark.startswith("batchwise: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "probpromt"}, r"'probpromt'\. [Dd]id you mean 'probprompt'"),
        ({"training": {"epoch": 3}}, r"'training\.epoch'\. [Dd]id you mean 'training\.epochs'"),
        ({"training": 3}, "training"),
        ({"method": 3}, "method"),
    ],
)
def test_wrong_structure_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(settings)


def test_assigned_values_may_be_none_lists_or_text() -> None:
    settings = apply_assignments({}, ["top_k=none", "blocks=[0, 2]", "reference=task", "tasks=4,4,2"])
    assert settings["method"] == {"top_k": None, "blocks": [0, 2], "reference": "task"}
    assert settings["data"] == {"tasks": "4,4,2"}


def test_another_method_drops_the_settings_of_the_first() -> None:
    merged = merge({"method": {"name": "probprompt", "samples": 3}}, {"method": "linear-probe"})
    assert merged["method"] == {"name": "linear-probe"}
    assert merge({"method": {"samples": 3}}, {"method": {"name": "probprompt"}})["method"]["samples"] == 3
    assert apply_values({"method": "linear-probe"}, {"head_lr": 0.1})["training"] == {"head_lr": 0.1}


def test_toml(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[training]\nepochs = 3\n[method]\nname = 'probprompt'\nsamples = 4\n")
    assert parse_config(read_toml(tmp_path / "a.toml")).training.epochs == 3
    (tmp_path / "b.toml").write_text("[training\n")
    for name, hint in (("b.toml", "not valid TOML"), ("c.toml", "Cannot read")):
        with pytest.raises(UserError, match=hint):
            read_toml(tmp_path / name)


def test_paths_become_absolute_but_names_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "emoji-r"):
        (tmp_path / name).mkdir()
    for given, written in (("photos", str(tmp_path / "photos")), ("emoji-r", "emoji-r"), ("nowhere", "nowhere")):
        assert with_absolute_paths(parse_config({"data": {"benchmark": given}})).data.benchmark == written
