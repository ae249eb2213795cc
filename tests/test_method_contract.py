"""What holds for the prompts of every method alike; each file of a method has its own rules."""

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from method_helpers import build, injected, move, normal, same, training
from probprompt.errors import UserError
from probprompt.methods import Method, TaskSummary, find, parse_config, registered

WIDTH, DEPTH, CLASSES = 6, 5, 2
PREFIXES: dict[str, Any] = {"blocks": (1, 3), "tokens": 4}
POOL: dict[str, Any] = {"components": 6, "top_k": 3}
SMALL: dict[str, dict[str, Any]] = {
    "apt": {"blocks": (1, 3)},
    "coda-prompt": {**PREFIXES, "components_per_task": 1},
    "deep-l2p++": {**PREFIXES, **POOL},
    "dual-prompt": {"general_blocks": (0,), "expert_blocks": (1, 3), "general_tokens": 2, "expert_tokens": 4},
    "evo-prompt": {"blocks": (1, 3), "tokens": 2, "hidden": 3},
    "hide-prompt": {**PREFIXES, "contrast_centroids": 2, "identity_alignment": {"epochs": 2}},
    "l2p": {"tokens": 3, **POOL},
    "l2p++": {"blocks": (1, 3), "tokens": 4, **POOL},
    "probprompt": {**PREFIXES, "components": 3, "samples": 5},
    "vq-prompt": {**PREFIXES, "components": 5},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SMALL),
    ("dual-prompt", {"shared_keys": True}),
    ("dual-prompt", {"copy_previous": True}),
    ("probprompt", {"variant": "deterministic"}),
    ("coda-prompt", {"orthogonality_weight": 0.1}),
]
each_variant = pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)


def fresh(name: str, seed: int = 7, /, **settings: Any) -> Method:
    return build(name, WIDTH, DEPTH, seed, **{**SMALL[name], **settings})


def summary_of(task: int) -> TaskSummary:
    labels = CLASSES * task + torch.arange(CLASSES).repeat(12)
    queries, features = normal(2, len(labels), WIDTH, seed=task) + 3 * labels[:, None]
    return TaskSummary(task, CLASSES * task, CLASSES, labels, queries, features, normal(len(labels), CLASSES))


def taught(name: str, tasks: int = 2, moved: bool = True, **settings: Any) -> Method:
    """A method in the middle of its last task, with everything somewhere else than it began."""
    method = fresh(name, **settings)
    for task in range(tasks):
        if task and moved:
            method.end_task(summary_of(task - 1))
        method.begin_task(task, CLASSES)
        if moved:
            move(method, task)
    return method


def queries_of(method: Method, count: int) -> Tensor | None:
    return normal(count, WIDTH, scale=3) if method.needs_query else None


@each_variant
def test_evaluation_depends_on_no_other_image(name: str, settings: dict[str, Any]) -> None:
    """Nor on training steps and random numbers in between."""
    method = taught(name, tasks=3, **settings)
    query = queries_of(method, 33)
    together = injected(method, query)
    injected(method, query, training(1))
    torch.manual_seed(99)
    assert same(injected(method, query), together)
    if query is None:
        return
    backwards, alone = injected(method, query.flip(0)), [injected(method, row[None]) for row in query]
    exact = name not in ("probprompt", "coda-prompt", "evo-prompt")  # the others choose and add nothing up
    rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
    for block, tokens in together.items():
        for other in (backwards[block].flip(0), torch.cat([found[block] for found in alone])):
            torch.testing.assert_close(tokens, other, rtol=rtol, atol=atol)


STATE = {
    "apt": {"running", "merged", "has_merged"},
    "coda-prompt": {f"{name}.{task}" for name in ("components", "keys", "attention") for task in range(2)},
    "deep-l2p++": {"pool", "keys"},
    "dual-prompt": {"general.0", "experts.0", "experts.1", "keys.0", "keys.1"},
    "l2p": {"pool", "keys"},
    "l2p++": {"pool", "keys"},
    "probprompt": {"mean", "log_std", "cached_mean", "cached_log_std"},
    "vq-prompt": {"pool", "keys"},
}


@each_variant
def test_a_saved_method_goes_on_as_if_nothing_had_happened(name: str, settings: dict[str, Any]) -> None:
    method, loaded = taught(name, **settings), taught(name, moved=False, **settings)
    assert set(method.state_dict()) == STATE.get(name, set(method.state_dict()))
    loaded.load_state_dict(method.state_dict(), strict=True)
    query = queries_of(method, 20)
    assert same(injected(loaded, query), injected(method, query))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in method.parameters()]
    for one in (method, loaded):
        move(one, 5)
        one.end_task(summary_of(1))
        one.begin_task(2, CLASSES)
    assert same(injected(loaded, query, training(2)), injected(method, query, training(2)))
    for key, tensor in method.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@each_variant
def test_fixed_prompts_go_on_working(name: str, settings: dict[str, Any]) -> None:
    method = taught(name, **settings)
    before = injected(method, queries_of(method, 5))
    method.requires_grad_(False)
    assert not [parameter for parameters, _ in method.groups() for parameter in parameters]
    assert same(injected(method, queries_of(method, 5)), before)


def tensors_of(method: Method) -> dict[str, Tensor]:
    """What was drawn, of parts of which each block has its own: (blocks, ..., D)."""
    found = {**dict(method.named_parameters()), **dict(method.named_buffers())}
    parts = ("identity", "general", "cached", "reference")
    drawn = {key: value.detach() for key, value in found.items() if not key.startswith(parts)}
    return {key: value for key, value in drawn.items() if value.dim() > 1 and len(value.unique()) > 1}


@pytest.mark.parametrize("name", SMALL)
def test_draws_depend_on_seed_block_and_task_alone(name: str) -> None:
    settings: dict[str, Any] = {"copy_previous": False} if name == "hide-prompt" else {}
    method, again, other = (fresh(name, seed, **settings) for seed in (7, 7, 8))
    single = {"general_blocks": (), "expert_blocks": (3,)} if name == "dual-prompt" else {"blocks": (3,)}
    last = fresh(name, **({} if name == "l2p" else single), **settings)
    for one in (method, again, other, last):
        torch.manual_seed(id(one) % 1000)
        for task in range(2):
            one.begin_task(task, CLASSES)
    drawn = tensors_of(method)
    assert drawn
    for key, value in drawn.items():
        assert torch.equal(value, tensors_of(again)[key])
        assert not torch.isclose(value, tensors_of(other)[key], rtol=1e-6).all(dim=-1).any()
        assert torch.equal(value[-1], tensors_of(last)[key][-1])
    rows = torch.cat([value.reshape(-1, value.shape[-1]) for value in drawn.values() if value.shape[-1] == WIDTH])
    assert len(rows.unique(dim=0)) == len(rows), "no two blocks, tasks and tokens share what was drawn"


DRAWN = {"uniform": (0, 0.5, 12**-0.5), "symmetric": (-1, 0, 3**-0.5), "normal": (-6, 0, 1)}


@pytest.mark.parametrize("name", ["probprompt", "vq-prompt", "l2p", "l2p++", "deep-l2p++", "dual-prompt"])
def test_initial_numbers(name: str) -> None:
    setting = "initial_mean" if name == "probprompt" else "initial"
    for kind in DRAWN if name in ("probprompt", "vq-prompt") else ("uniform", "symmetric"):
        low, mean, deviation = DRAWN[kind]
        method = build(name, 400, 12, **{setting: kind, f"{setting}_scale": 0.02})
        method.begin_task(0, CLASSES)
        for key, parameter in method.named_parameters():
            if key != "log_std":
                drawn = parameter.detach() / (1 if (name, key) == ("vq-prompt", "keys") else 0.02)
                assert drawn.min() >= low and drawn.max() <= (6 if kind == "normal" else 1)
                assert float(drawn.mean()) == pytest.approx(mean, abs=0.05)
                assert float(drawn.std()) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("name", ["coda-prompt", "vq-prompt"])
def test_autocast_changes_nothing(name: str) -> None:
    method = taught(name, orthogonality_weight=0.1) if name == "coda-prompt" else taught(name)
    query = normal(7, WIDTH)
    plain, loss = injected(method, query), method.prompts(query, training(1)).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(injected(method, query), plain)
        cast = method.prompts(query, training(1)).loss
    assert loss is not None and cast is not None and loss.dtype == torch.float32 and torch.equal(loss, cast)
    assert all(tokens.dtype == torch.float32 for tokens in injected(method, query.bfloat16()).values())


@pytest.mark.parametrize("name", ["coda-prompt", "dual-prompt"])
def test_what_a_task_adds_is_made_where_the_method_is(name: str) -> None:
    for target in (torch.device("meta"), torch.float64):
        method = fresh(name).to(target)
        for task in range(1 if target is not torch.float64 else 2):
            method.begin_task(task, CLASSES)
        assert all(target in (parameter.device, parameter.dtype) for parameter in method.parameters())


@pytest.mark.parametrize(
    ("name", "tasks", "parameters", "tokens"),
    [
        ("apt", 1, 2 * 12 * 768, [2] * 12),
        ("coda-prompt", 2, 2 * 5 * 10 * (8 + 1 + 1) * 768, [8] * 5),
        ("deep-l2p++", 1, 5 * 30 * (20 + 1) * 768, [100] * 5),
        ("dual-prompt", 10, 2 * 6 * 768 + 3 * 10 * (20 + 1) * 768, [6, 6, 20, 20, 20]),
        ("l2p", 1, 10 * (5 + 1) * 768, [25]),
        ("l2p++", 1, 30 * (20 + 1) * 768, [100]),
        ("probprompt", 1, 614_400, [8] * 5),
        ("vq-prompt", 1, 345_600, [8] * 5),
    ],
)
def test_published_sizes(name: str, tasks: int, parameters: int, tokens: list[int]) -> None:
    method = build(name, 768, 12, 0)
    for task in range(tasks):
        method.begin_task(task, 10)
    assert sum(parameter.numel() for parameter in method.parameters()) == parameters
    found = injected(method, torch.ones(2, 768) if method.needs_query else None)
    assert list(found) == list(range(len(tokens)))
    assert [part.shape[-2] for part in found.values()] == tokens


@pytest.mark.parametrize("name", registered())
def test_a_method_is_found_by_name_and_marked_by_request_only(name: str) -> None:
    config = parse_config(name)
    assert type(config) is find(name).Config and config.name == name and config.marks() == ()
    assert parse_config({"name": name}) == config == parse_config(config)
    with pytest.raises(UserError, match=f"id you mean '{name}'".replace("+", r"\+")):
        parse_config(f"{name}s")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, ("batchwise",)) for name in ("l2p", "l2p++", "deep-l2p++", "dual-prompt")),
        *((name, ("batchwise", "legacy_key_loss")) for name in ("l2p++", "deep-l2p++")),
        ("dual-prompt", ("batchwise", "legacy_reshape")),
        ("hide-prompt", ("legacy_reshape",)),
    ],
)
def test_published_mistakes_are_marked(name: str, settings: tuple[str, ...]) -> None:
    marks = parse_config({"name": name, **dict.fromkeys(settings, True)}).marks()
    assert [mark.split(":")[0] for mark in marks] == list(settings)
    assert all("other images" in mark or "others in the batch" in mark for mark in marks)


@pytest.mark.parametrize("blocks", [(DEPTH,), (4, DEPTH + 3), (-1, 4)])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "l2p"])
def test_blocks_outside_the_backbone_are_refused(name: str, blocks: tuple[int, ...]) -> None:
    outside = [block for block in blocks if not 0 <= block < DEPTH]
    for setting in ("general_blocks", "expert_blocks") if name == "dual-prompt" else ("blocks",):
        with pytest.raises(UserError, match=rf"method\.{setting}.*blocks 0 to {DEPTH - 1}") as problem:
            fresh(name, **{setting: blocks})
        assert str(outside) in str(problem.value)
        fresh(name, **{setting: (4,)})


MEANINGLESS = {
    "apt": "blocks=[] blocks=[1,1] ema=1.1 ema=-0.1 initial_std=0 tokens=8",
    "coda-prompt": "blocks=[] blocks=[1,1] tokens=0 tokens=5 components_per_task=0 orthogonality_weight=-1",
    "dual-prompt": "general_blocks=[1,1] general_blocks=[0,2] expert_blocks=[2,2] expert_blocks=[] general_tokens=5 "
    'general_tokens=0 expert_tokens=7 expert_tokens=0 pull=-1 key_loss="max" initial="normal" initial_scale=0 tasks=10',
    "evo-prompt": "blocks=[] blocks=[1,1] tokens=0 hidden=0 fusion=-0.1 fusion=1.5 part=0 temperature=0 sub_heads=192",
    "hide-prompt": "blocks=[] blocks=[1,1] tokens=5 momentum=1.0 momentum=-0.1 contrast=-1 contrast_temperature=0 "
    "contrast_centroids=0 identity_lr_scale=0 identity_epochs=0 identity_batch_size=0 "
    'identity_alignment={"optimizer":"adam"} identity_alignment={"epoch":3}',
    "l2p": 'top_k=0 top_k=11 pull=-1 initial="normal" initial_scale=0 tokens=0 blocks=[0] legacy_key_loss=true',
    "l2p++": 'blocks=[] blocks=[1,1] tokens=0 tokens=5 top_k=0 top_k=31 pull=-1 initial="normal" initial_scale=0',
    "probprompt": "blocks=[] blocks=[1,1] tokens=0 tokens=5 components=0 samples=-1 top_k=0 top_k=11 initial_std=0 "
    'relevance_temperature=0 relevance_temperature="sqrt" regularization=-1 variant="mix" reference="batch" sample=3',
    "vq-prompt": "blocks=[] blocks=[1,1] tokens=0 tokens=5 components=0 temperature=0 commitment_weight=-1 "
    'pool_weight=-1 initial="zero" initial_scale=0 samples=3',
}


@pytest.mark.parametrize("name, setting", [(name, one) for name, some in MEANINGLESS.items() for one in some.split()])
def test_settings_without_meaning_are_refused(name: str, setting: str) -> None:
    key, value = setting.split("=")
    with pytest.raises(ValidationError):
        parse_config({"name": name, key: json.loads(value)})
