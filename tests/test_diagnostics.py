"""What is read off a trained method: likeness and rank of prompts, use of components, the map of queries."""

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from probprompt.evaluation import diagnostics
from probprompt.evaluation.diagnostics import (
    component_usage,
    effective_rank,
    injected_tokens,
    mean_pairwise,
    pca,
    prompt_diversity,
    query_map,
    similarity,
    tsne,
)
from probprompt.methods import EVALUATION, Context, Method, Prompted, Shape, find, parse_config, registered
from probprompt.methods.probprompt import ProbPrompt, ProbPromptConfig
from probprompt.prompts import ClassTokenShift, Prefix, Prompt, Tokens

WIDTH = 8
NAMES = ["ant", "bee", "cat"]


class Fixed(Method):
    """A method whose prompts and relevance are given."""

    def __init__(self, prompts: dict[int, Prompt] | None = None, weights: dict[int, Tensor] | None = None) -> None:
        super().__init__(Shape(WIDTH, 4), 0)
        self.given, self.weights = prompts or {}, weights or {}

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        assert context == EVALUATION and (query is not None) == self.needs_query
        return Prompted(self.given)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        return self.weights


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def probprompt(seed: int = 0, **settings: Any) -> ProbPrompt:
    small = {"blocks": (0, 2), "tokens": 4, "components": 3, "samples": 2, **settings}
    return ProbPrompt(ProbPromptConfig(**small), Shape(WIDTH, 4), seed)


def linear_probe() -> Method:
    return find("linear-probe").create(parse_config("linear-probe"), Shape(WIDTH, 4), 0)


def test_doctests() -> None:
    result = doctest.testmod(diagnostics)
    assert result.failed == 0 and result.attempted > 0


# Tokens


def test_injected_tokens_are_keys_then_values_slot_by_slot() -> None:
    key, value = normal(3, 2, WIDTH), normal(3, 2, WIDTH, seed=1)
    tokens = injected_tokens(Fixed({1: Prefix(key, value)}), normal(3, WIDTH))
    assert list(tokens) == [1]
    assert tokens[1].shape == (4, 3, WIDTH)
    for query in range(3):
        assert torch.equal(tokens[1][:2, query], key[query])
        assert torch.equal(tokens[1][2:, query], value[query])


def test_a_prefix_shared_by_the_batch_counts_for_every_query() -> None:
    shared = Fixed({0: Prefix(normal(2, WIDTH), normal(2, WIDTH, seed=1))})
    tokens = injected_tokens(shared, normal(5, WIDTH))
    assert tokens[0].shape == (4, 5, WIDTH)
    torch.testing.assert_close(similarity(tokens), torch.ones(5, 5, dtype=torch.float64))
    assert effective_rank(tokens) == pytest.approx(1)


class Blind(Fixed):
    """A method whose prompts depend on no query."""

    needs_query = False


def test_tokens_that_join_are_their_own_slots() -> None:
    tokens = normal(3, 5, WIDTH)
    found = injected_tokens(Fixed({2: Tokens(tokens, positioned=True)}), normal(3, WIDTH))
    assert list(found) == [2] and torch.equal(found[2], tokens.transpose(0, 1))
    shared = injected_tokens(Blind({2: Tokens(tokens[0])}), normal(4, WIDTH))
    assert torch.equal(shared[2], tokens[0][:, None].expand(5, 4, WIDTH))


def test_a_shift_has_two_slots_its_key_and_its_value() -> None:
    key, value = normal(3, WIDTH), normal(3, WIDTH, seed=1)
    found = injected_tokens(Fixed({1: ClassTokenShift(key, value)}), normal(3, WIDTH))
    assert torch.equal(found[1], torch.stack([key, value]))
    shared = injected_tokens(Blind({1: ClassTokenShift(key[0], value[0])}), normal(4, WIDTH))
    assert torch.equal(shared[1], torch.stack([key[0], value[0]])[:, None].expand(2, 4, WIDTH))
    torch.testing.assert_close(similarity(shared), torch.ones(4, 4, dtype=torch.float64))


def test_prompts_of_all_kinds_are_compared_slot_by_slot() -> None:
    tokens, (key, value) = normal(2, 3, WIDTH), normal(2, 2, WIDTH, seed=1)
    method = Fixed({0: Tokens(tokens), 3: ClassTokenShift(key, value)})
    found = similarity(injected_tokens(method, normal(2, WIDTH)))
    pairs = [*zip(tokens[0], tokens[1], strict=True), (key[0], key[1]), (value[0], value[1])]
    cosines = [float(torch.cosine_similarity(one, other, dim=0)) for one, other in pairs]
    assert float(found[0, 1]) == pytest.approx(sum(cosines) / 5, abs=1e-6)


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_method_shows_as_much_as_it_has(name: str) -> None:
    """Its prompts beside those of a fresh one, and its components, after two tasks."""
    trained, fresh = (find(name).create(parse_config(name), Shape(24, 6), 0) for _ in range(2))
    for method in (trained, fresh):
        for task in range(2):
            method.begin_task(task, 2)
    with torch.no_grad():
        for index, parameter in enumerate(trained.parameters()):
            parameter.add_(0.1 * normal(*parameter.shape, seed=index))
    queries = normal(3, 24, seed=9)
    found, usage = prompt_diversity(trained, fresh, queries, NAMES), component_usage(trained, queries)
    prompts = injected_tokens(trained, queries)
    assert (found is None) == (not prompts)
    if found is not None:
        assert set(found["per_block"]) == set(map(str, prompts))
        assert -1 <= found["mean"] <= 1 + 1e-6 and np.isfinite(found["initial_mean"])
        assert 1 <= found["effective_rank"] <= 3 + 1e-6
    if usage is not None:
        for shares in usage["usage"]:
            assert min(shares) >= 0 and np.isfinite(shares).all()


# Similarity and rank


def test_identical_prompts_have_similarity_and_rank_one() -> None:
    tokens = {0: normal(4, 1, WIDTH).expand(4, 3, WIDTH), 2: normal(4, 1, WIDTH, seed=1).expand(4, 3, WIDTH)}
    torch.testing.assert_close(similarity(tokens), torch.ones(3, 3, dtype=torch.float64))
    assert mean_pairwise(similarity(tokens)) == pytest.approx(1)
    assert effective_rank(tokens) == pytest.approx(1)


def test_orthogonal_prompts_have_similarity_zero_and_full_rank() -> None:
    tokens = {0: torch.eye(WIDTH)[:5].expand(4, 5, WIDTH)}
    torch.testing.assert_close(similarity(tokens), torch.eye(5, dtype=torch.float64))
    assert mean_pairwise(similarity(tokens)) == pytest.approx(0)
    assert effective_rank(tokens) == pytest.approx(5)


def test_opposite_prompts_have_similarity_minus_one() -> None:
    prompt = normal(4, 1, WIDTH)
    tokens = {0: torch.cat([prompt, -3 * prompt], dim=1)}
    assert mean_pairwise(similarity(tokens)) == pytest.approx(-1)
    assert effective_rank(tokens) == pytest.approx(1)


def test_similarity_is_the_cosine_within_a_slot_averaged_over_slots_and_blocks() -> None:
    tokens = {0: normal(2, 3, WIDTH), 3: 50 * normal(2, 3, WIDTH, seed=1)}
    found = similarity(tokens)
    for one in range(3):
        for other in range(3):
            cosines = [
                float(slot[one] @ slot[other] / slot[one].norm() / slot[other].norm())
                for block in tokens.values()
                for slot in block
            ]
            assert float(found[one, other]) == pytest.approx(sum(cosines) / 4, abs=1e-6)


def test_the_mean_is_over_pairs_of_different_queries() -> None:
    matrix = torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.6], [0.2, 0.6, 1.0]])
    assert mean_pairwise(matrix) == pytest.approx(0.3)
    assert mean_pairwise(torch.ones(1, 1)) == 0


def test_effective_rank_is_between_and_averages_over_slots() -> None:
    uneven = torch.zeros(1, 2, WIDTH)
    uneven[0, 0, 0], uneven[0, 1, 1] = 3.0, 1.0
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank({0: uneven}) == pytest.approx(math.exp(entropy))
    flat = torch.ones(1, 2, WIDTH)
    assert effective_rank({0: uneven, 1: flat}) == pytest.approx((math.exp(entropy) + 1) / 2)


def test_prompts_of_nothing_but_zeros_have_rank_one() -> None:
    assert effective_rank({0: torch.zeros(2, 3, WIDTH)}) == 1


def test_diversity_compares_the_trained_prompts_with_those_at_the_start() -> None:
    trained, start, queries = probprompt(), probprompt(), normal(3, WIDTH)
    with torch.no_grad():
        trained.mean.copy_(normal(*trained.mean.shape, seed=4))
    found = prompt_diversity(trained, start, queries, NAMES)
    assert found is not None
    with torch.no_grad():
        after, before = injected_tokens(trained, queries), injected_tokens(start, queries)
    assert found["labels"] == NAMES
    np.testing.assert_allclose(found["matrix"], similarity(after).numpy(), atol=6e-5)
    assert found["mean"] == pytest.approx(mean_pairwise(similarity(after)))
    assert found["initial_mean"] == pytest.approx(mean_pairwise(similarity(before)))
    assert found["effective_rank"] == pytest.approx(effective_rank(after))
    assert found["initial_effective_rank"] == pytest.approx(effective_rank(before))
    assert found["mean"] != pytest.approx(found["initial_mean"], abs=1e-3)
    assert set(found["per_block"]) == {"0", "2"}
    assert sum(found["per_block"].values()) / 2 == pytest.approx(found["mean"])


# Components


@pytest.mark.parametrize("settings", [{}, {"relevance_temperature": "dim"}, {"top_k": 2}], ids=str)
def test_usage_sums_to_one_and_entropy_is_a_share(settings: dict[str, Any]) -> None:
    method, queries = probprompt(**settings), normal(20, WIDTH)
    found = component_usage(method, queries)
    assert found is not None
    assert found["blocks"] == [0, 2]
    for slot, weights in enumerate(method.relevance(queries).values()):
        usage = found["usage"][slot]
        assert len(usage) == 3 and sum(usage) == pytest.approx(1)
        np.testing.assert_allclose(usage, weights.detach().numpy().mean(axis=(0, 1)), rtol=1e-5)
        assert 0 < found["entropy"][slot] < 1
        assert found["max_weight"][slot] == pytest.approx(float(weights.detach().amax(dim=-1).mean()))


def test_the_entropy_is_one_for_even_use_and_zero_for_a_single_component() -> None:
    even, single = torch.full((5, 4, 3), 1 / 3), torch.zeros(5, 4, 3)
    single[..., 1] = 1
    found = component_usage(Fixed(weights={0: even, 3: single}), normal(5, WIDTH))
    assert found is not None
    assert found["blocks"] == [0, 3]
    assert found["entropy"] == pytest.approx([1, 0])
    assert found["max_weight"] == pytest.approx([1 / 3, 1])
    assert found["usage"][1] == pytest.approx([0, 1, 0])


def test_entropy_is_taken_per_query_and_not_of_the_average() -> None:
    """Queries that each choose a component of their own use all of them, and still choose sharply."""
    weights = torch.eye(3)[:, None, :].expand(3, 4, 3)
    found = component_usage(Fixed(weights={0: weights}), normal(3, WIDTH))
    assert found is not None
    assert found["usage"][0] == pytest.approx([1 / 3] * 3)
    assert found["entropy"] == pytest.approx([0])


def test_a_pool_of_one_component_has_no_entropy() -> None:
    found = component_usage(probprompt(components=1), normal(4, WIDTH))
    assert found is not None
    assert found["entropy"] == [0, 0] and found["usage"] == [[1], [1]]


def test_many_queries_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    method, queries = probprompt(), normal(10, WIDTH)
    whole = component_usage(method, queries)
    sizes: list[int] = []
    relevance = method.relevance

    def counted(some: Tensor) -> dict[int, Tensor]:
        sizes.append(len(some))
        return relevance(some)

    monkeypatch.setattr(method, "relevance", counted)
    monkeypatch.setattr(diagnostics, "QUERIES", 4)
    parts = component_usage(method, queries)
    assert sizes == [4, 4, 2] and whole is not None and parts is not None
    for name in ("usage", "entropy", "max_weight"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5)


def test_a_linear_probe_has_nothing_to_show() -> None:
    probe, queries = linear_probe(), normal(3, WIDTH)
    assert prompt_diversity(probe, linear_probe(), queries, NAMES) is None
    assert component_usage(probe, queries) is None


# The map of queries


@pytest.mark.parametrize(("count", "kind"), [(2, "PCA"), (9, "PCA"), (10, "t-SNE")])
def test_the_map_shows_every_query_with_its_class(count: int, kind: str) -> None:
    labels = torch.arange(count) % 3
    found = query_map(normal(count, WIDTH), labels, NAMES, 1)
    assert found["embedding"] == kind
    assert found["labels"] == labels.tolist()
    assert len(found["points"]) == count and all(len(point) == 2 for point in found["points"])
    assert np.isfinite(found["points"]).all()
    assert (found["names"], found["task"]) == (NAMES, 1)


def test_a_map_of_many_queries_shows_an_even_choice_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "POINTS", 5)
    found = query_map(normal(41, WIDTH), torch.arange(41), NAMES, 1)
    assert found["labels"] == [0, 10, 20, 30, 40]
    assert len(found["points"]) == 5


def test_query_map_of_coinciding_queries_is_their_pca() -> None:
    queries = torch.cat([torch.zeros(15, WIDTH), torch.ones(15, WIDTH)])
    drawn = query_map(queries, torch.arange(30) // 15, NAMES, 0)
    assert drawn["embedding"] == "PCA"
    assert len({tuple(point) for point in drawn["points"]}) == 2
    single = query_map(torch.ones(12, WIDTH), torch.zeros(12), NAMES, 0)
    assert single["points"] == [[0.0, 0.0]] * 12


def test_tsne_separates_clusters_and_repeats_exactly() -> None:
    """Eight clusters on orthogonal axes, of which two principal components can show only some."""
    labels = np.repeat(np.arange(8), 12)
    points = 6 * np.eye(8, 16)[labels] + np.random.default_rng(1).standard_normal((96, 16)) / 2
    plane = tsne(points)
    distances = ((plane[:, None] - plane[None]) ** 2).sum(axis=-1) + np.diag(np.full(96, np.inf))
    assert (labels[distances.argmin(axis=1)] == labels).mean() > 0.9
    assert np.array_equal(plane, tsne(points))


def test_pca_orders_components_by_variance_with_fixed_signs() -> None:
    points = np.random.default_rng(0).standard_normal((50, 3)) * np.array([1.0, 5.0, 0.2])
    plane = pca(points)
    assert plane[:, 0].var() > plane[:, 1].var()
    np.testing.assert_allclose(pca(points + 3.0), plane, atol=1e-9)
    assert np.corrcoef(plane[:, 0], points[:, 1])[0, 1] > 0.99
    assert pca(points[:1]).tolist() == [[0.0, 0.0]] and not pca(points[:, :1])[:, 1].any()
