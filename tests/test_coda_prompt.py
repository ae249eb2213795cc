"""CODA-Prompt against its formulas, written down a second time with loops in float64."""

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, coda_prompt, parse_config
from probprompt.methods.coda_prompt import CodaPrompt, CodaPromptConfig, orthogonality, orthonormal
from probprompt.prompts import Prefix

Array = NDArray[np.float64]

WIDTH, DEPTH, BATCH = 12, 5, 7
BLOCKS = (1, 3)
TRAINING = Context(training=True, task=0)
NAMES = ("components", "keys", "attention")


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> CodaPrompt:
    """A small method before its first task."""
    small = {"blocks": BLOCKS, "tokens": 4, "components_per_task": 3, **settings}
    return CodaPrompt(CodaPromptConfig(**small), Shape(width, DEPTH), seed)


def begun(tasks: int, **settings: Any) -> CodaPrompt:
    """A method that began so many tasks, and moved away from where each of them began."""
    method = fresh(**settings)
    for task in range(tasks):
        method.begin_task(task, 10)
        move(method, task)
    return method


@torch.no_grad()
def move(method: CodaPrompt, seed: int) -> None:
    """Change what is trained, as an optimiser would."""
    source = torch.Generator().manual_seed(seed)
    for parameter in method.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.3)


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    return 0.5 + 2 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens_of(method: CodaPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    """Keys and values of every block, one after the other: (B, L, D)."""
    found = {}
    for block, prefix in method.prompts(query, context).prompts.items():
        assert isinstance(prefix, Prefix)
        found[block] = torch.cat([prefix.key, prefix.value], dim=1)
    return found


def slices_of(method: CodaPrompt, name: str) -> list[Tensor]:
    slices = getattr(method, name)
    assert isinstance(slices, nn.ParameterList)
    return [part.detach() for part in slices]


def vectors_of(method: CodaPrompt, name: str, slot: int) -> Array:
    """All vectors of a block, one after the other: (N, features)."""
    rows = [vector.double().numpy().ravel() for part in slices_of(method, name) for vector in part[slot]]
    return np.array(rows)


# The paper once more


def paper_weights(query: Array, keys: Array, attention: Array) -> Array:
    weights = []
    for key, attend in zip(keys, attention, strict=True):
        seen = query * attend
        weights.append(seen @ key / math.sqrt(seen @ seen) / math.sqrt(key @ key))
    return np.array(weights)


def paper_tokens(method: CodaPrompt, slot: int, queries: Tensor) -> Array:
    keys, attention = vectors_of(method, "keys", slot), vectors_of(method, "attention", slot)
    components = vectors_of(method, "components", slot).reshape(len(keys), -1, WIDTH)
    result = []
    for query in queries.double().numpy():
        weights = paper_weights(query, keys, attention)
        result.append(sum(weight * part for weight, part in zip(weights, components, strict=True)))
    return np.array(result)


def paper_penalty(vectors: Array) -> float:
    count = len(vectors)
    gaps = [(vectors[i] @ vectors[j] - (i == j)) ** 2 for i in range(count) for j in range(count)]
    return float(sum(gaps)) / count**2


def paper_gram_schmidt(drawn: Array, orthogonal: Array) -> Array:
    """The textbook's, one projection at a time, after vectors that are orthogonal to each other."""
    done = list(orthogonal)
    for vector in drawn:
        rest = vector - sum((vector @ other) / (other @ other) * other for other in done)
        done.append(rest / math.sqrt(rest @ rest))
    return np.array(done[len(orthogonal) :])


# What is injected


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"tokens": 2}, {"components_per_task": 1}], ids=str)
def test_tokens_follow_the_paper(settings: dict[str, Any], tasks: int, context: Context) -> None:
    method, query = begun(tasks, **settings), some_queries()
    found = tokens_of(method, query, context)
    assert list(found) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        np.testing.assert_allclose(found[block].detach(), paper_tokens(method, slot, query), rtol=1e-5, atol=1e-6)


def test_the_first_half_of_the_tokens_are_keys_and_the_second_half_values() -> None:
    method = begun(1, blocks=(0,), components_per_task=1)
    with torch.no_grad():  # the attended query is the key: its cosine is 1
        method.attention[0].fill_(1.0)
        method.keys[0].copy_(some_queries(1)[None])
    prefix = method.prompts(some_queries(1), EVALUATION).prompts[0]
    assert isinstance(prefix, Prefix)
    torch.testing.assert_close(prefix.key, method.components[0][0, :, :2])
    torch.testing.assert_close(prefix.value, method.components[0][0, :, 2:])


def test_weights_do_not_depend_on_lengths_and_may_be_negative() -> None:
    method, query = begun(2), some_queries()
    plain = tokens_of(method, query)
    with torch.no_grad():
        for part in (*method.keys, *method.attention):
            part.mul_(3)
    longer, against = tokens_of(method, 5 * query), tokens_of(method, -query)
    for block in BLOCKS:
        torch.testing.assert_close(longer[block], plain[block])
        torch.testing.assert_close(against[block], -plain[block])


def test_the_slices_of_all_tasks_take_part() -> None:
    query = some_queries()
    for task in range(3):
        for name in NAMES:
            method = begun(3)
            before = tokens_of(method, query)
            with torch.no_grad():
                getattr(method, name)[task].mul_(torch.linspace(0.5, 2, WIDTH))
            after = tokens_of(method, query)
            assert not any(torch.allclose(before[block], after[block], atol=1e-3) for block in BLOCKS)


def test_nothing_is_injected_before_the_first_task() -> None:
    assert not fresh().prompts(some_queries(), EVALUATION).prompts
    assert fresh().relevance(some_queries()) == {}


def test_no_other_image_matters() -> None:
    method, query = begun(3), some_queries(33)
    together, backwards = tokens_of(method, query), tokens_of(method, query.flip(0))
    for block in BLOCKS:
        torch.testing.assert_close(together[block], backwards[block].flip(0), rtol=1e-6, atol=1e-7)
        for image in range(len(query)):
            alone = tokens_of(method, query[image : image + 1])[block][0]
            torch.testing.assert_close(together[block][image], alone, rtol=1e-6, atol=1e-7)


def test_autocast_changes_nothing() -> None:
    method, query = begun(2, orthogonality_weight=0.1), some_queries()
    plain, loss = tokens_of(method, query), method.prompts(query, TRAINING).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_loss = tokens_of(method, query), method.prompts(query, TRAINING).loss
    assert loss is not None and cast_loss is not None
    assert loss.dtype == torch.float32 and torch.equal(loss, cast_loss)
    for block in BLOCKS:
        assert cast[block].dtype == torch.float32 and torch.equal(cast[block], plain[block])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_go_through_weights_and_components(name: str) -> None:
    """A path that is cut anywhere makes the gradient differ from finite differences."""
    method, query = begun(2).double(), some_queries().double()
    parameter: Tensor = getattr(method, name)[1]
    source = torch.Generator().manual_seed(3)
    direction = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    upstream = torch.randn(2, BATCH, 4, WIDTH, generator=source, dtype=torch.float64)

    def value(step: float) -> float:
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            result = sum(
                float((torch.from_numpy(paper_tokens(method, slot, query)) * upstream[slot]).sum())
                for slot in range(len(BLOCKS))
            )
            parameter.add_(direction, alpha=-step)
        return result

    found = torch.stack(list(tokens_of(method, query, TRAINING).values()))
    (gradient,) = torch.autograd.grad((found * upstream).sum(), parameter)
    expected = (value(1e-5) - value(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6)
    assert (gradient != 0).flatten(1).any(dim=1).all()


def test_a_vector_of_zeros_has_weight_zero_and_a_finite_gradient() -> None:
    method = begun(1)
    with torch.no_grad():
        method.attention[0][:, 0] = 0
        method.keys[0][:, 1] = 0
    tokens = tokens_of(method, torch.cat([some_queries(2), torch.zeros(1, WIDTH)]), TRAINING)
    assert all((part[2] == 0).all() and part.isfinite().all() for part in tokens.values())
    sum(part.sum() for part in tokens.values()).backward()  # type: ignore[union-attr]
    assert all(part.grad is not None and part.grad.isfinite().all() for part in method.parameters())


# Relevance


def test_relevance_is_each_components_share_of_the_absolute_weights() -> None:
    method, query = begun(3), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        keys, attention = vectors_of(method, "keys", slot), vectors_of(method, "attention", slot)
        cosines = np.array([np.abs(paper_weights(one, keys, attention)) for one in query.double().numpy()])
        assert shown[block].shape == (BATCH, 1, 9)
        expected = cosines / cosines.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(shown[block][:, 0].detach(), expected, rtol=1e-5, atol=1e-7)


def test_relevance_of_nothing_is_spread_evenly() -> None:
    for weights in begun(2).relevance(torch.zeros(1, WIDTH)).values():
        torch.testing.assert_close(weights, torch.full((1, 1, 6), 1 / 6))


# New slices


def test_the_papers_number_of_parameters() -> None:
    method = CodaPrompt(CodaPromptConfig(), Shape(768, 12), 0)
    assert not list(method.parameters())
    method.begin_task(0, 10)
    assert [tuple(part.shape) for part in method.parameters()] == [(5, 10, 8, 768), (5, 10, 768), (5, 10, 768)]
    method.begin_task(1, 10)
    assert sum(part.numel() for part in method.parameters()) == 2 * 5 * 10 * (8 + 1 + 1) * 768


@pytest.mark.parametrize("name", NAMES)
def test_a_new_slice_is_orthonormal_and_orthogonal_to_what_was_trained(name: str) -> None:
    method = begun(2)
    for slot in range(len(BLOCKS)):
        trained = vectors_of(method, name, slot)
        askew = np.abs(trained @ trained.T - np.eye(6))
        assert askew.max() > 0.1
    method.begin_task(2, 10)
    for slot in range(len(BLOCKS)):
        vectors = vectors_of(method, name, slot)
        np.testing.assert_allclose(vectors[6:] @ vectors[6:].T, np.eye(3), atol=1e-6)
        np.testing.assert_allclose(vectors[6:] @ vectors[:6].T, 0, atol=2e-6)


def test_orthonormal_is_gram_schmidt() -> None:
    source = np.random.default_rng(0)
    drawn, base = source.normal(size=(4, 9)), np.linalg.qr(source.normal(size=(9, 3)))[0].T
    orthogonal = base * np.array([[0.1], [2.0], [30.0]])  # of any length
    askew = source.normal(size=(3, 3)) @ orthogonal  # the same span
    expected = paper_gram_schmidt(drawn, orthogonal)
    for earlier in (orthogonal, askew, np.concatenate([askew, askew]), np.concatenate([askew, np.zeros((1, 9))])):
        found = orthonormal(torch.from_numpy(drawn), torch.from_numpy(earlier))
        np.testing.assert_allclose(found, expected, atol=1e-10)
    first = orthonormal(torch.from_numpy(drawn), torch.zeros(0, 9, dtype=torch.float64))
    np.testing.assert_allclose(first, paper_gram_schmidt(drawn, np.zeros((0, 9))), atol=1e-12)


@pytest.mark.parametrize(("count", "earlier"), [(3, 4), (3, 5), (3, 6), (3, 40), (6, 0), (7, 0), (20, 0), (20, 4)])
def test_vectors_without_room_are_orthogonal_within_their_slice_as_far_as_it_goes(count: int, earlier: int) -> None:
    width = 6
    source = torch.Generator().manual_seed(count + earlier)
    before = torch.randn(earlier, width, generator=source, dtype=torch.float64)
    found = orthonormal(torch.randn(count, width, generator=source, dtype=torch.float64), before)
    assert found.shape == (count, width)
    room = max(0, width - earlier)
    cosines = (found @ found.mT).abs()
    torch.testing.assert_close(cosines.diagonal(), torch.ones(count, dtype=torch.float64))
    assert (found[:room] @ before.mT).abs().max() < 1e-10 if room and earlier else True
    alike = cosines - torch.eye(count)
    fitting = alike[: min(count, width), : min(count, width)]
    assert fitting.max() < 1e-10  # up to the width, a slice is orthonormal whatever came before
    assert alike.max() < 0.999  # and beyond it, no vector is there twice


@pytest.mark.parametrize(("width", "each"), [(6, 4), (4, 10), (48, 10), (1, 2)])
def test_a_narrow_backbone_can_learn_more_tasks_than_it_has_room_for(width: int, each: int) -> None:
    method = fresh(width=width, components_per_task=each, tokens=2, orthogonality_weight=0.1)
    for task in range(7):
        method.begin_task(task, 10)
        for name in NAMES:
            newest = slices_of(method, name)[-1].flatten(2)
            torch.testing.assert_close(newest.norm(dim=-1), torch.ones(len(BLOCKS), each))
        move(method, task)
    answer = method.prompts(torch.randn(3, width, generator=torch.Generator().manual_seed(0)), TRAINING)
    assert answer.loss is not None and answer.loss.isfinite()
    for prefix in answer.prompts.values():
        assert isinstance(prefix, Prefix) and prefix.key.isfinite().all() and prefix.value.isfinite().all()


def test_what_is_drawn_depends_on_the_seed_the_block_and_the_task() -> None:
    def slices(seed: int = 7, blocks: tuple[int, ...] = BLOCKS) -> dict[str, Tensor]:
        method = fresh(seed, blocks=blocks)
        for task in range(2):
            method.begin_task(task, 10)
        return {name: torch.stack(slices_of(method, name)) for name in NAMES}  # (tasks, blocks, n, ...)

    first, same, other, alone = slices(), slices(), slices(seed=8), slices(blocks=(BLOCKS[1],))
    for name, drawn in first.items():
        assert torch.equal(drawn, same[name]) and not torch.isclose(drawn, other[name]).all()
        assert torch.equal(drawn[:, 1], alone[name][:, 0])
        assert len(drawn.flatten(0, 2).unique(dim=0)) == 2 * 2 * 3
    assert not torch.isclose(first["keys"], first["attention"]).any()
    later = fresh()
    later.begin_task(1, 10)  # nothing came before it, so that what it drew is not turned away from anything
    assert not torch.isclose(slices_of(later, "keys")[0], first["keys"][0], atol=1e-4).all()


def test_a_slice_is_made_where_the_method_lives() -> None:
    method = fresh().to("meta")
    method.begin_task(0, 10)
    assert all(parameter.device.type == "meta" for parameter in method.parameters())
    wide = fresh().double()
    wide.begin_task(0, 10)
    wide.begin_task(1, 10)
    assert all(parameter.dtype == torch.float64 for parameter in wide.parameters())


# What learns


def test_only_the_newest_slice_learns() -> None:
    method, query = begun(3, orthogonality_weight=0.5), some_queries()
    newest = {id(getattr(method, name)[2]) for name in NAMES}
    assert {id(part) for parts, _ in method.groups() for part in parts} == newest
    before = {name: [part.clone() for part in slices_of(method, name)] for name in NAMES}
    optimiser = torch.optim.AdamW([{"params": parts} for parts, _ in method.groups()], lr=0.01, weight_decay=0.1)
    answer = method.prompts(query, TRAINING)
    assert answer.loss is not None
    tokens = torch.stack([prefix.key for prefix in answer.prompts.values() if isinstance(prefix, Prefix)])
    (tokens.square().sum() + answer.loss).backward()
    optimiser.step()
    for name in NAMES:
        after = slices_of(method, name)
        assert torch.equal(after[0], before[name][0]) and torch.equal(after[1], before[name][1])
        assert not torch.isclose(after[2], before[name][2], rtol=0, atol=1e-6).any()


def test_prompts_that_were_fixed_go_on_working() -> None:
    method, query = begun(2), some_queries()
    before = tokens_of(method, query)
    method.requires_grad_(False)
    assert not [part for parts, _ in method.groups() for part in parts]
    assert all(torch.equal(tokens, before[block]) for block, tokens in tokens_of(method, query).items())


# Orthogonality


def test_orthogonality_by_hand() -> None:
    vectors = torch.tensor([[2.0, 0.0], [1.0, 1.0]])  # X X^T = [[4, 2], [2, 2]]
    assert orthogonality(vectors).item() == pytest.approx((3**2 + 2**2 + 2**2 + 1**2) / 4)


def test_the_loss_is_the_weighted_penalty_over_all_slices_and_blocks() -> None:
    method = begun(3, orthogonality_weight=0.25)
    expected = sum(paper_penalty(vectors_of(method, name, slot)) for name in NAMES for slot in range(len(BLOCKS)))
    loss = method.prompts(some_queries(), TRAINING).loss
    assert loss is not None
    assert loss.item() == pytest.approx(0.25 * expected, rel=1e-5)
    assert expected > 0.1


def test_there_is_no_loss_by_default_nor_at_evaluation() -> None:
    assert CodaPromptConfig().orthogonality_weight == 0
    assert begun(2).prompts(some_queries(), TRAINING).loss is None
    assert begun(2, orthogonality_weight=0.1).prompts(some_queries(), EVALUATION).loss is None


def test_new_slices_add_no_overlap_of_their_own() -> None:
    method = fresh()
    for task in range(4):  # 4 x 3 = 12 keys fill the width
        method.begin_task(task, 10)
        assert method.overlap().item() < 1e-10
    method.begin_task(4, 10)
    assert method.overlap().item() > 1e-3


# Saving


def test_a_saved_method_is_rebuilt_and_goes_on_as_if_nothing_had_happened() -> None:
    method, query = begun(2), some_queries()
    assert set(method.state_dict()) == {f"{name}.{task}" for name in NAMES for task in range(2)}
    rebuilt = fresh()
    for task in range(2):
        rebuilt.begin_task(task, 10)
    rebuilt.load_state_dict(method.state_dict(), strict=True)
    found, expected = tokens_of(rebuilt, query), tokens_of(method, query)
    assert all(torch.equal(found[block], expected[block]) for block in BLOCKS)
    flags = [[part.requires_grad for part in one.parameters()] for one in (method, rebuilt)]
    assert flags[0] == flags[1]
    for one in (method, rebuilt):
        one.begin_task(2, 10)
    for name, tensor in method.state_dict().items():
        assert torch.equal(rebuilt.state_dict()[name], tensor)


# Settings


@pytest.mark.parametrize("blocks", [(DEPTH,), (0, DEPTH + 3), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.blocks"):
        fresh(blocks=blocks)


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": (1, 1)},
        {"blocks": ()},
        {"tokens": 5},
        {"tokens": 0},
        {"components_per_task": 0},
        {"orthogonality_weight": -1},
        {"components": 100},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CodaPromptConfig(**settings)


def test_the_method_is_found_by_name() -> None:
    assert parse_config({"name": "coda-prompt", "components_per_task": 5}) == CodaPromptConfig(components_per_task=5)
    assert CodaPromptConfig().marks() == ()


def test_doctests() -> None:
    result = doctest.testmod(coda_prompt)
    assert result.failed == 0 and result.attempted > 0
