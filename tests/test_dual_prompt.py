"""DualPrompt against its rules, written down a second time with loops in float64."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from method_helpers import cosine, injected, loss_of, normal, same, training
from probprompt.methods import EVALUATION, Context, Shape
from probprompt.methods.dual_prompt import DualPrompt, DualPromptConfig

WIDTH, DEPTH, BATCH, TASKS = 7, 6, 6, 3
GENERAL, EXPERT = (1,), (2, 4)
KEYS = [{}, {"shared_keys": True}]
LAST = training(TASKS - 1)


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


def some_queries(count: int = BATCH) -> Tensor:
    return normal(count, WIDTH, scale=5)


def matches(method: DualPrompt, slot: int, query: Tensor) -> list[int]:
    """The task of every image, by the largest cosine."""
    found = []
    for row in query:
        cosines = [cosine(row, key[slot if len(key) > 1 else 0]) for key in method.keys]
        found.append(cosines.index(max(cosines)))
    return found


@pytest.mark.parametrize("settings", KEYS, ids=str)
def test_training_uses_the_expert_of_the_task(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    for task in range(TASKS):
        found = injected(method, query, training(task))
        assert list(found) == [*GENERAL, *EXPERT]
        for slot, block in enumerate(EXPERT):
            assert torch.equal(found[block], method.experts[task][slot].expand(BATCH, -1, -1))


@pytest.mark.parametrize("settings", KEYS, ids=str)
def test_evaluation_uses_the_expert_with_the_nearest_key(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries(12)
    found, shown = injected(method, query), method.relevance(query)
    assert list(found) == [*GENERAL, *EXPERT] and list(shown) == list(EXPERT)
    for slot, block in enumerate(EXPERT):
        expected = matches(method, slot, query)
        assert len(set(expected)) == TASKS
        assert torch.equal(found[block], torch.stack([method.experts[task][slot] for task in expected]))
        assert torch.equal(shown[block], torch.eye(TASKS)[expected][:, None])
    one, other = shown.values()
    assert torch.equal(one, other) == bool(settings), "blocks match by themselves unless they share keys"


@pytest.mark.parametrize("context", [EVALUATION, LAST], ids=["evaluation", "training"])
def test_all_images_get_the_general_prompt(context: Context) -> None:
    method = moved()
    assert torch.equal(injected(method, some_queries(), context)[GENERAL[0]], method.general[0].expand(BATCH, -1, -1))


def test_what_has_no_expert_of_its_own_is_matched_like_any_image() -> None:
    """At evaluation whatever is known of the task, and in a task that came after the prompts were fixed."""
    method, query = moved().requires_grad_(False), some_queries()
    for context in (Context(task=1, labels=torch.ones(BATCH).long(), first=2), training(TASKS)):
        assert same(injected(method, query, context), injected(method, query))
        assert method.prompts(query, context).loss is None


@pytest.mark.parametrize("width", [1, 5, 16, 19])
def test_among_equal_keys_the_earlier_task_wins(width: int) -> None:
    method = fresh(tasks=9, width=width)
    with torch.no_grad():
        for key in method.keys:
            key.copy_(method.keys[2])
        method.keys[0].mul_(-1)
    assert [hot.argmax().item() for hot in method.relevance(method.keys[2][:1].detach() + 0.1).values()] == [1, 1]


def test_general_or_expert_prompts_alone() -> None:
    method, query = fresh(tasks=0), some_queries()
    for context in (EVALUATION, training(0)):
        assert list(injected(method, query, context)) == list(GENERAL)
        assert method.prompts(query, context).loss is None
    assert method.relevance(query) == {}
    assert list(injected(fresh(general_blocks=()), query)) == list(EXPERT)


def test_the_published_vote_is_of_the_majority_at_evaluation_only() -> None:
    method, query = moved(batchwise=True), some_queries(12)
    found, shown = injected(method, query), method.relevance(query)
    for slot, block in enumerate(EXPERT):
        own = matches(method, slot, query)
        votes = Counter(own)
        winner = min(range(TASKS), key=lambda task: (-votes[task], task))
        assert set(own) != {winner}
        assert torch.equal(found[block], method.experts[winner][slot].expand(12, -1, -1))
        assert torch.equal(shown[block], torch.eye(TASKS)[[winner] * 12][:, None])
    assert same(injected(method, query, training(0)), injected(moved(), query, training(0)))


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
    right, wrong = injected(moved(), query, context), injected(moved(legacy_reshape=True), query, context)
    assert torch.equal(right[GENERAL[0]], wrong[GENERAL[0]])
    for block in EXPERT:
        # All keys in the order of the images, then all values: the first image gets the first two, and so on. In
        # training one half of the images so gets two keys, the other two values.
        dealt = [*right[block][:, :2], *right[block][:, 2:]]
        for image in range(batch):
            assert torch.equal(wrong[block][image], torch.cat(dealt[2 * image : 2 * image + 2]))
        assert torch.equal(right[block], wrong[block]) == (batch == 1)


@pytest.mark.parametrize("settings", KEYS, ids=str)
@pytest.mark.parametrize("pull", [1.0, 0.3])
@pytest.mark.parametrize("batch", [1, 2, BATCH])
def test_the_loss_is_the_distance_of_the_tasks_keys(batch: int, pull: float, settings: dict[str, Any]) -> None:
    """Summed over keys, and summed or averaged over images."""
    method, query = moved(pull=pull, **settings), some_queries(batch)
    averaged = moved(pull=pull, key_loss="mean", **settings)
    for task in range(TASKS):
        expected = pull * sum(1 - cosine(row, key) for row in query for key in method.keys[task])
        loss = loss_of(method, query, training(task))
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, rel=1e-5)
        assert loss_of(averaged, query, training(task)).item() == pytest.approx(expected / batch, rel=1e-5)


def test_there_is_no_loss_at_evaluation_or_without_weight() -> None:
    assert DualPromptConfig(pull=1, key_loss="sum", initial="uniform", initial_scale=1) == DualPromptConfig()
    assert moved().prompts(some_queries(), EVALUATION).loss is None
    assert moved(pull=0).prompts(some_queries(), LAST).loss is None


def test_the_loss_moves_the_tasks_keys_towards_the_queries() -> None:
    method, query = moved(), some_queries()
    loss_of(method, query, LAST).backward()
    gradient = method.keys[-1].grad
    assert gradient is not None
    for slot, key in enumerate(method.keys[-1].detach()):
        toward = torch.zeros(WIDTH)
        for row in query:  # d cos(q, K) / dK = (q/|q| - cos K/|K|) / |K|
            toward += (row / row.norm() - cosine(row, key) * key / key.norm()) / key.norm()
        torch.testing.assert_close(gradient[slot], -toward, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in [*method.general, *method.experts, *method.keys[:-1]])


def test_a_task_trains_the_general_prompt_and_its_own_expert_and_key() -> None:
    method, query = fresh(tasks=0), some_queries()
    for task in range(TASKS):
        method.begin_task(task, 2)
        before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
        ((parameters, factor),) = method.groups()
        assert factor == 1 and len(parameters) == 3
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
        tokens = torch.cat(list(injected(method, query, training(task)).values()), dim=1)
        (loss_of(method, query, training(task)) + (tokens - 1).square().sum()).backward()
        optimizer.step()
        changed = {name for name, tensor in method.state_dict().items() if (tensor != before[name]).any()}
        assert changed == {"general.0", f"experts.{task}", f"keys.{task}"}


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
