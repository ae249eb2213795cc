"""DualPrompt against its rules, written down a second time with loops in float64."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, parse_config
from probprompt.methods.dual_prompt import DualPrompt, DualPromptConfig
from probprompt.prompts import Prefix

WIDTH, DEPTH, BATCH, TASKS = 7, 6, 6, 3
GENERAL, EXPERT = (1,), (2, 4)
KEYS = [{}, {"shared_keys": True}]


def fresh(tasks: int = TASKS, seed: int = 7, width: int = WIDTH, **settings: Any) -> DualPrompt:
    """A small method at the beginning of its last task."""
    small = {"general_blocks": GENERAL, "expert_blocks": EXPERT, "general_tokens": 2, "expert_tokens": 4, **settings}
    method = DualPrompt(DualPromptConfig(**small), Shape(width, DEPTH), seed)
    for task in range(tasks):
        method.begin_task(task, 2)
    return method


def moved(**settings: Any) -> DualPrompt:
    """A small method with keys of all directions and of different lengths."""
    method, source = fresh(**settings), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for task, key in enumerate(method.keys):
            key.copy_((1 + 3 * task) * torch.randn(key.shape, generator=source))
    return method


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    return 5 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def training(task: int = TASKS - 1) -> Context:
    return Context(training=True, task=task)


def prefixes(method: DualPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Prefix]:
    """What is injected, with a prefix for every image."""
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        assert isinstance(prompt, Prefix)
        shape = (len(query), prompt.length, prompt.width)
        found[block] = Prefix(prompt.key.expand(shape), prompt.value.expand(shape))
    return found


def same(one: Prefix, other: Prefix) -> bool:
    return torch.equal(one.key, other.key) and torch.equal(one.value, other.value)


def image_of(prefix: Prefix, image: int) -> Prefix:
    return Prefix(prefix.key[image], prefix.value[image])


def expert_of(method: DualPrompt, task: int, slot: int) -> Prefix:
    tokens = method.experts[task][slot]
    return Prefix(tokens[:2], tokens[2:])


def cosine(one: Tensor, other: Tensor) -> float:
    first, second = list(map(float, one.detach())), list(map(float, other.detach()))
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


def matches(method: DualPrompt, slot: int, query: Tensor) -> list[int]:
    """The task of every image, by the largest cosine."""
    found = []
    for row in query:
        cosines = [cosine(row, key[slot if len(key) > 1 else 0]) for key in method.keys]
        found.append(cosines.index(max(cosines)))
    return found


def loss_of(method: DualPrompt, query: Tensor, task: int = TASKS - 1) -> Tensor:
    loss = method.prompts(query, training(task)).loss
    assert loss is not None
    return loss


# What is injected


def test_the_published_sizes() -> None:
    method = DualPrompt(DualPromptConfig(), Shape(768, 12), 0)
    for task in range(10):
        method.begin_task(task, 20)
    count = sum(parameter.numel() for parameter in method.parameters())
    assert count == 2 * 6 * 768 + 3 * 10 * (20 * 768 + 768)
    found = prefixes(method, torch.ones(2, 768))
    assert {block: prefix.length for block, prefix in found.items()} == {0: 3, 1: 3, 2: 10, 3: 10, 4: 10}


@pytest.mark.parametrize("settings", KEYS, ids=str)
@pytest.mark.parametrize("task", range(TASKS))
def test_training_uses_the_expert_of_the_task(task: int, settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    found = prefixes(method, query, training(task))
    assert list(found) == [*GENERAL, *EXPERT]
    for slot, block in enumerate(EXPERT):
        assert all(same(image_of(found[block], image), expert_of(method, task, slot)) for image in range(BATCH))


@pytest.mark.parametrize("settings", KEYS, ids=str)
def test_evaluation_uses_the_expert_with_the_nearest_key(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries(12)
    found, shown = prefixes(method, query), method.relevance(query)
    assert list(found) == [*GENERAL, *EXPERT] and list(shown) == list(EXPERT)
    for slot, block in enumerate(EXPERT):
        expected = matches(method, slot, query)
        assert len(set(expected)) == TASKS
        for image, task in enumerate(expected):
            assert same(image_of(found[block], image), expert_of(method, task, slot))
        assert torch.equal(shown[block], torch.eye(TASKS)[expected][:, None])


def test_blocks_match_by_themselves_unless_they_share_keys() -> None:
    query = some_queries(12)
    own, shared = moved().relevance(query), moved(shared_keys=True).relevance(query)
    assert not torch.equal(own[EXPERT[0]], own[EXPERT[1]])
    assert torch.equal(shared[EXPERT[0]], shared[EXPERT[1]])
    assert [tuple(key.shape) for key in moved().keys] == [(2, WIDTH)] * TASKS
    assert [tuple(key.shape) for key in moved(shared_keys=True).keys] == [(1, WIDTH)] * TASKS


def test_evaluation_looks_at_neither_task_nor_labels() -> None:
    method, query = moved(), some_queries()
    told = Context(task=1, labels=torch.ones(BATCH).long(), first=2)
    found, expected = prefixes(method, query, told), prefixes(method, query)
    assert all(same(found[block], expected[block]) for block in expected)
    assert method.prompts(query, told).loss is None


@pytest.mark.parametrize("context", [EVALUATION, training()], ids=["evaluation", "training"])
def test_all_images_get_the_general_prompt(context: Context) -> None:
    method = moved()
    prefix = prefixes(method, some_queries(), context)[GENERAL[0]]
    for image in range(BATCH):
        assert torch.equal(prefix.key[image], method.general[0][:1])
        assert torch.equal(prefix.value[image], method.general[0][1:])


@pytest.mark.parametrize("width", [1, 5, 16, 19])
def test_among_equal_keys_the_earlier_task_wins(width: int) -> None:
    method = fresh(tasks=9, width=width)
    with torch.no_grad():
        for key in method.keys:
            key.copy_(method.keys[2])
        method.keys[0].mul_(-1)
    query = method.keys[2][:1].detach() + 0.1
    assert [hot.argmax().item() for hot in method.relevance(query).values()] == [1, 1]


def test_before_the_first_task_there_is_the_general_prompt_alone() -> None:
    method, query = fresh(tasks=0), some_queries()
    for context in (EVALUATION, training(0)):
        assert list(prefixes(method, query, context)) == list(GENERAL)
        assert method.prompts(query, context).loss is None
    assert method.relevance(query) == {}


def test_experts_without_a_general_prompt() -> None:
    assert list(prefixes(fresh(general_blocks=()), some_queries())) == list(EXPERT)


def test_a_task_after_the_prompts_were_fixed_is_matched_like_any_image() -> None:
    method, query = moved().requires_grad_(False), some_queries()
    found, expected = prefixes(method, query, training(TASKS)), prefixes(method, query)
    assert all(same(found[block], expected[block]) for block in expected)
    assert method.prompts(query, training(TASKS)).loss is None


# Batch mates


@pytest.mark.parametrize("settings", KEYS, ids=str)
def test_evaluation_depends_on_no_other_image(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries(9)
    together, backwards = prefixes(method, query), prefixes(method, query.flip(0))
    for block, prefix in together.items():
        for image in range(len(query)):
            alone = prefixes(method, query[image : image + 1])[block]
            assert same(image_of(prefix, image), image_of(alone, 0))
            assert same(image_of(prefix, image), image_of(backwards[block], len(query) - 1 - image))


def test_the_published_vote_is_of_the_majority_at_evaluation_only() -> None:
    method, query = moved(batchwise=True), some_queries(12)
    found, shown = prefixes(method, query), method.relevance(query)
    for slot, block in enumerate(EXPERT):
        own = matches(method, slot, query)
        votes = Counter(own)
        winner = min(range(TASKS), key=lambda task: (-votes[task], task))
        assert set(own) != {winner}
        assert all(same(image_of(found[block], image), expert_of(method, winner, slot)) for image in range(12))
        assert torch.equal(shown[block], torch.eye(TASKS)[[winner] * 12][:, None])
    trained, correct = prefixes(method, query, training(0)), prefixes(moved(), query, training(0))
    assert all(same(trained[block], correct[block]) for block in trained)


def test_a_vote_without_majority_goes_to_the_earlier_task() -> None:
    method = fresh(width=3, batchwise=True, shared_keys=True)
    with torch.no_grad():
        for task, key in enumerate(method.keys):
            key.copy_(torch.eye(3)[task])
    late_first = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert [hot[:, 0].argmax(dim=1).tolist() for hot in method.relevance(late_first).values()] == [[1, 1]] * 2
    two_late = torch.cat([late_first, late_first[:1]])
    assert [hot[:, 0].argmax(dim=1).tolist() for hot in method.relevance(two_late).values()] == [[2, 2, 2]] * 2


@pytest.mark.parametrize("context", [EVALUATION, training(1)], ids=["evaluation", "training"])
@pytest.mark.parametrize("batch", [1, 2, 5, 6])
def test_the_published_reshape_deals_keys_and_values_out_over_the_batch(batch: int, context: Context) -> None:
    query = some_queries(batch)
    right, wrong = prefixes(moved(), query, context), prefixes(moved(legacy_reshape=True), query, context)
    assert same(right[GENERAL[0]], wrong[GENERAL[0]])
    for block in EXPERT:
        # All keys in the order of the images, then all values: the first image gets the first two, and so on.
        dealt = [*right[block].key, *right[block].value]
        for image in range(batch):
            assert torch.equal(wrong[block].key[image], dealt[2 * image])
            assert torch.equal(wrong[block].value[image], dealt[2 * image + 1])
        assert same(right[block], wrong[block]) == (batch == 1)


def test_the_published_reshape_makes_images_depend_on_each_other() -> None:
    method, query = moved(legacy_reshape=True), some_queries(8)
    together = prefixes(method, query)
    for block in EXPERT:
        alone = [image_of(prefixes(method, query[image : image + 1])[block], 0) for image in range(8)]
        assert not any(same(image_of(together[block], image), alone[image]) for image in range(8))


def test_the_published_reshape_in_training_gives_two_keys_to_one_half_and_two_values_to_the_other() -> None:
    method = moved(legacy_reshape=True)
    found = prefixes(method, some_queries(6), training(1))
    for slot, block in enumerate(EXPERT):
        expert = expert_of(method, 1, slot)
        for image in range(6):
            both = expert.key if image < 3 else expert.value
            assert same(image_of(found[block], image), Prefix(both, both))


# The loss on the keys


@pytest.mark.parametrize("settings", KEYS, ids=str)
@pytest.mark.parametrize("pull", [1.0, 0.3])
@pytest.mark.parametrize("task", range(TASKS))
def test_the_loss_sums_the_distance_of_the_tasks_keys(task: int, pull: float, settings: dict[str, Any]) -> None:
    method, query = moved(pull=pull, **settings), some_queries()
    expected = sum(1 - cosine(row, key) for row in query for key in method.keys[task])
    loss = loss_of(method, query, task)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(pull * expected, rel=1e-5)


@pytest.mark.parametrize("settings", KEYS, ids=str)
@pytest.mark.parametrize("batch", [1, 2, BATCH])
def test_the_loss_may_average_over_the_images_but_never_over_the_keys(batch: int, settings: dict[str, Any]) -> None:
    method, query = moved(pull=0.3, key_loss="mean", **settings), some_queries(batch)
    expected = sum(1 - cosine(row, key) for row in query for key in method.keys[1]) / batch
    assert loss_of(method, query, 1).item() == pytest.approx(0.3 * expected, rel=1e-5)
    summed = loss_of(moved(pull=0.3, **settings), query, 1)
    assert summed.item() == pytest.approx(0.3 * batch * expected, rel=1e-5)
    assert DualPromptConfig().key_loss == "sum"


def test_there_is_no_loss_at_evaluation_or_without_weight() -> None:
    assert DualPromptConfig().pull == 1
    assert moved().prompts(some_queries(), EVALUATION).loss is None
    assert moved(pull=0).prompts(some_queries(), training()).loss is None


def test_the_loss_moves_the_tasks_keys_towards_the_queries() -> None:
    method, query = moved(), some_queries()
    loss_of(method, query).backward()
    gradient = method.keys[-1].grad
    assert gradient is not None
    for slot, key in enumerate(method.keys[-1].detach()):
        toward = torch.zeros(WIDTH)
        for row in query:  # d cos(q, K) / dK = (q/|q| - cos K/|K|) / |K|
            toward += (row / row.norm() - cosine(row, key) * key / key.norm()) / key.norm()
        torch.testing.assert_close(gradient[slot], -toward, rtol=1e-4, atol=1e-6)
    others = [*method.general, *method.experts, *method.keys[:-1]]
    assert all(parameter.grad is None for parameter in others)


# Growing


def test_a_new_task_freezes_the_experts_and_keys_before_it() -> None:
    method = fresh(tasks=0)
    for task in range(TASKS):
        method.begin_task(task, 2)
        names = {name for name, parameter in method.named_parameters() if parameter.requires_grad}
        assert names == {"general.0", f"experts.{task}", f"keys.{task}"}
        ((parameters, factor),) = method.groups()
        assert factor == 1 and len(parameters) == 3


def test_training_a_task_changes_the_general_prompt_and_its_own_expert_and_key() -> None:
    method, query = moved(), some_queries()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    ((parameters, _),) = method.groups()
    optimiser = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    for _ in range(2):
        answer = method.prompts(query, training())
        assert answer.loss is not None
        loss = answer.loss
        for prompt in answer.prompts.values():
            assert isinstance(prompt, Prefix)
            loss = loss + prompt.key.square().sum() + (prompt.value - 1).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    changed = {name for name, tensor in method.state_dict().items() if (tensor != before[name]).any()}
    assert changed == {"general.0", "experts.2", "keys.2"}


def test_what_is_drawn_depends_on_the_seed_the_block_and_the_task_alone() -> None:
    method, again, other = fresh(), fresh(), fresh(seed=8)
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert not torch.isclose(tensor, other.state_dict()[name]).all(dim=-1).any()
    rows = torch.cat([tensor.reshape(-1, WIDTH) for tensor in method.state_dict().values()])
    assert len(rows.unique(dim=0)) == len(rows) == 2 + TASKS * 2 * (4 + 1)
    alone = fresh(general_blocks=(), expert_blocks=EXPERT[1:])
    for task in range(TASKS):
        assert torch.equal(alone.experts[task][0], method.experts[task][1])
        assert torch.equal(alone.keys[task][0], method.keys[task][1])


@pytest.mark.parametrize(("initial", "low"), [("uniform", 0.0), ("symmetric", -1.0)])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_initial_numbers(initial: str, low: float, scale: float) -> None:
    method = fresh(width=300, initial=initial, initial_scale=scale)
    for parameter in method.parameters():
        drawn = parameter.detach() / scale
        assert drawn.min() >= low and drawn.max() <= 1
        assert drawn.min() < low + 0.03 and drawn.max() > 0.97
        assert float(drawn.mean()) == pytest.approx((1 + low) / 2, abs=0.07)
    assert DualPromptConfig().initial == "uniform" and DualPromptConfig().initial_scale == 1


def test_a_new_expert_may_begin_where_the_one_before_it_ended() -> None:
    method, drawn = fresh(tasks=1, copy_previous=True), fresh(tasks=2)
    assert torch.equal(method.experts[0], drawn.experts[0])
    with torch.no_grad():
        method.experts[0].add_(1)
    method.begin_task(1, 2)
    assert torch.equal(method.experts[1], method.experts[0])
    assert method.experts[1].requires_grad and not method.experts[0].requires_grad
    assert method.experts[1].data_ptr() != method.experts[0].data_ptr()
    assert torch.equal(method.keys[1], drawn.keys[1])
    assert not torch.equal(drawn.experts[1], drawn.experts[0])


@pytest.mark.parametrize("settings", [*KEYS, {"copy_previous": True}], ids=str)
def test_a_saved_method_is_rebuilt_by_the_same_tasks(settings: dict[str, Any]) -> None:
    method, loaded, query = moved(**settings), fresh(seed=9, **settings), some_queries()
    kinds = {"general.0"} | {f"{kind}.{task}" for kind in ("experts", "keys") for task in range(TASKS)}
    assert set(method.state_dict()) == kinds
    loaded.load_state_dict(method.state_dict())
    found, expected = prefixes(loaded, query), prefixes(method, query)
    assert all(same(found[block], expected[block]) for block in expected)
    assert [parameter.requires_grad for parameter in loaded.parameters()] == [
        parameter.requires_grad for parameter in method.parameters()
    ]


def test_new_experts_are_made_where_the_method_is() -> None:
    for target in (torch.device("meta"), torch.float64):
        method = fresh(tasks=1, general_blocks=()).to(target)
        method.begin_task(1, 2)
        assert all(target in (parameter.device, parameter.dtype) for parameter in method.parameters())


# Settings


def test_published_mistakes_are_never_the_default_and_always_marked() -> None:
    assert DualPromptConfig().marks() == ()
    (vote,) = DualPromptConfig(batchwise=True).marks()
    (mixed,) = DualPromptConfig(legacy_reshape=True).marks()
    assert vote.startswith("batchwise: ") and mixed.startswith("legacy_reshape: ")
    assert "batch mates" in vote and "batch mates" in mixed
    assert DualPromptConfig(batchwise=True, legacy_reshape=True).marks() == (vote, mixed)


@pytest.mark.parametrize("setting", ["general_blocks", "expert_blocks"])
@pytest.mark.parametrize("blocks", [(DEPTH,), (0, DEPTH + 3), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(setting: str, blocks: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {setting: blocks, ("expert_blocks" if setting[0] == "g" else "general_blocks"): (3,)}
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.{setting}") as problem:
        fresh(**settings)
    assert str([block for block in blocks if not 0 <= block < DEPTH]) in str(problem.value)
    assert ({"general_blocks", "expert_blocks"} - {setting}).pop() not in str(problem.value)


def test_the_last_block_may_have_experts() -> None:
    assert list(prefixes(fresh(expert_blocks=(DEPTH - 1,)), some_queries())) == [*GENERAL, DEPTH - 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"general_blocks": (1, 1)},
        {"expert_blocks": (2, 2)},
        {"expert_blocks": ()},
        {"general_blocks": (0, 2)},
        {"general_tokens": 5},
        {"expert_tokens": 7},
        {"general_tokens": 0},
        {"expert_tokens": 0},
        {"pull": -1},
        {"key_loss": "max"},
        {"initial": "normal"},
        {"initial_scale": 0},
        {"tasks": 10},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DualPromptConfig(**settings)


def test_the_method_is_found_by_name() -> None:
    assert parse_config({"name": "dual-prompt", "pull": 0.5}) == DualPromptConfig(pull=0.5)
