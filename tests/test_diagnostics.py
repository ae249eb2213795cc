"""What is read off a trained method: likeness and rank of prompts, use of components, the map of queries."""

import math
from types import SimpleNamespace
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
    mean_and_sampled,
    mean_pairwise,
    pca,
    prompt_diversity,
    query_map,
    selection,
    similarity,
    swap_test,
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
        assert context in (EVALUATION, Context(keys=None)) and (query is not None) == self.needs_query
        return Prompted(self.given)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        return self.weights


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def probprompt(seed: int = 0, **settings: Any) -> ProbPrompt:
    small = {"blocks": (0, 2), "tokens": 4, "components": 3, "samples": 2, **settings}
    return ProbPrompt(ProbPromptConfig(**small), Shape(WIDTH, 4), seed)


def test_mean_prompts_and_samples_with_noise_of_their_own_are_told_apart() -> None:
    """For means from U[0, 1), samples of one component are alike by s / (1 + 3 sigma^2 / N_s)."""
    shape, queries = Shape(1024, 5), normal(20, 1024)
    for std, samples in ((1.0, 4), (4.0, 16)):
        config = ProbPromptConfig(components=1, samples=samples, initial_std=std)
        method = ProbPrompt(config, shape, 0)
        found = mean_and_sampled(method, method, queries)
        assert found["mean_similarity"] == pytest.approx(1) and found["mean_rank"] == pytest.approx(1)
        assert found["noise"] == pytest.approx(std / samples**0.5, rel=0.03) == found["initial_noise"]
        assert found["sampled_similarity"] == pytest.approx(1 / (1 + 3 * std**2 / samples), abs=0.02)
        assert found["sampled_rank"] > 5
    sampled = {"sampled_similarity", "sampled_rank", "initial_sampled_similarity", "initial_sampled_rank"}
    plain = ProbPrompt(ProbPromptConfig(variant="deterministic"), shape, 0)
    without = mean_and_sampled(plain, plain, queries)
    assert "noise" not in without and not sampled & set(without) and sampled <= set(found)


def test_selection_counts_the_most_relevant_components() -> None:
    first = torch.zeros(200, 2, 4).scatter_(2, torch.tensor([0] * 150 + [1] * 48 + [2] * 2)[:, None, None], 1.0)
    second = torch.full((200, 2, 4), 0.1).scatter_(2, torch.full((200, 2, 1), 3), 0.7)
    first[:, 1] = first[:, 0]
    found = selection(Fixed(weights={0: first, 3: second}), normal(200, WIDTH))
    assert found == {"components": 4, "components_used": 1.5, "largest_share": pytest.approx((0.75 + 1) / 2)}
    assert selection(Fixed(), normal(2, WIDTH)) == {}


class Echo(Method):
    """A method whose prompts are the queries."""

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        assert query is not None
        return Prompted({0: Tokens(query[:, None]), 2: Prefix(torch.zeros(1, WIDTH), torch.zeros(1, WIDTH))})


@pytest.mark.parametrize("method", [Echo(Shape(WIDTH, 4), 0), Fixed({0: Tokens(torch.zeros(2, WIDTH))})])
def test_the_swap_test_gives_images_the_prompts_of_others(method: Method) -> None:
    """Logits are the prompts: wrong with another image's, and equal with the average; no image is of class 1."""
    rows, queries = torch.arange(10), torch.nn.functional.one_hot(torch.arange(10) + 2).float()

    def logits(some: Tensor) -> Tensor:
        prompt = method.prompts(queries[some], EVALUATION).prompts[0]
        assert isinstance(prompt, Tokens) and prompt.batch in (None, len(some))
        return prompt.tokens.expand(len(some), -1, -1)[:, 0]

    def changed(some: Tensor) -> Tensor:
        prompt = method.prompts(queries[some], EVALUATION).prompts[0]
        assert isinstance(prompt, Tokens)
        seen.append(prompt.tokens.expand(len(some), -1, -1)[:, 0])
        return seen[-1]

    seen: list[Tensor] = []
    model = SimpleNamespace(method=method, known=lambda *_: EVALUATION)
    parts = {"queries": lambda some: queries[some], "logits": logits, "computed_logits": changed, "batch": 3}
    scorer: Any = SimpleNamespace(model=model, images=SimpleNamespace(store=None), **parts)
    found = swap_test(scorer, rows, rows + 2)
    if isinstance(method, Fixed):
        assert found == {}
        return
    assert found["images"] == 10 and found["own"] == 100 and found["swapped"] == 0 and found["average"] <= 10
    torch.testing.assert_close(seen[-1], queries.mean(dim=0).expand(len(seen[-1]), -1))
    assert method.prompts(queries, EVALUATION).prompts[0].batch == 10, "the method is as it was"


def test_injected_tokens_have_the_slots_of_their_kind() -> None:
    key, value, tokens = normal(3, 2, WIDTH), normal(3, 2, WIDTH, seed=1), normal(3, 5, WIDTH)
    shift = ClassTokenShift(key[:, 0], value[:, 0])
    given: dict[int, Prompt] = {1: Prefix(key, value), 2: Tokens(tokens, positioned=True), 3: shift}
    found = injected_tokens(Fixed(given), normal(3, WIDTH))
    slots = {1: torch.cat([key, value], dim=1), 2: tokens, 3: torch.stack([key[:, 0], value[:, 0]], dim=1)}
    assert list(found) == list(slots)
    assert all(torch.equal(found[block], slots[block].transpose(0, 1)) for block in slots)


class Blind(Fixed):
    """A method whose prompts depend on no query."""

    needs_query = False


@pytest.mark.parametrize("kind", [Fixed, Blind])
def test_a_prompt_shared_by_the_batch_counts_for_every_query(kind: type[Fixed]) -> None:
    key, value = normal(2, WIDTH), normal(2, WIDTH, seed=1)
    shared = kind({0: Prefix(key, value), 1: Tokens(key), 2: ClassTokenShift(key[0], value[0])})
    found = injected_tokens(shared, normal(5, WIDTH))
    slots = {0: torch.cat([key, value]), 1: key, 2: torch.stack([key[0], value[0]])}
    assert all(torch.equal(found[block], slots[block][:, None].expand(-1, 5, WIDTH)) for block in slots)
    torch.testing.assert_close(similarity(found), torch.ones(5, 5, dtype=torch.float64))
    assert effective_rank(found) == pytest.approx(1)


def test_prompts_of_all_kinds_are_compared_slot_by_slot() -> None:
    tokens, (key, value) = 50 * normal(3, 3, WIDTH), normal(2, 3, WIDTH, seed=1)
    found = similarity(injected_tokens(Fixed({0: Tokens(tokens), 3: ClassTokenShift(key, value)}), normal(3, WIDTH)))
    slots = [*tokens.unbind(dim=1), key, value]
    for one in range(3):
        for other in range(3):
            cosines = [float(slot[one] @ slot[other] / slot[one].norm() / slot[other].norm()) for slot in slots]
            assert float(found[one, other]) == pytest.approx(sum(cosines) / 5, abs=1e-6)


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


@pytest.mark.parametrize(
    ("prompts", "mean", "rank"),
    [
        (normal(4, 1, WIDTH).expand(4, 3, WIDTH), 1, 1),
        (torch.eye(WIDTH)[:5].expand(4, 5, WIDTH), 0, 5),
        (torch.tensor([1, -3])[:, None] * normal(4, 1, WIDTH), -1, 1),
        (torch.zeros(2, 3, WIDTH), 0, 1),
    ],
    ids=["identical", "orthogonal", "opposite", "zero"],
)
def test_similarity_and_rank_of_simple_prompts(prompts: Tensor, mean: float, rank: float) -> None:
    tokens = {0: prompts, 2: prompts}
    assert mean_pairwise(similarity(tokens)) == pytest.approx(mean, abs=1e-6)
    assert effective_rank(tokens) == pytest.approx(rank)


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


@pytest.mark.parametrize("settings", [{}, {"relevance_temperature": "dim"}, {"top_k": 2}], ids=str)
def test_component_usage_is_the_mean_relevance_per_component(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "QUERIES", 8)  # 20 queries in three parts
    method, queries = probprompt(**settings), normal(20, WIDTH)
    found = component_usage(method, queries)
    assert found is not None and found["blocks"] == [0, 2]
    for slot, weights in enumerate(method.relevance(queries).values()):
        usage = found["usage"][slot]
        assert len(usage) == 3 and sum(usage) == pytest.approx(1)
        np.testing.assert_allclose(usage, weights.detach().numpy().mean(axis=(0, 1)), rtol=1e-5)
        assert 0 < found["entropy"][slot] < 1
        assert found["max_weight"][slot] == pytest.approx(float(weights.detach().amax(dim=-1).mean()))


@pytest.mark.parametrize(
    ("weights", "usage", "entropy", "largest"),
    [
        (torch.full((5, 4, 3), 1 / 3), [1 / 3] * 3, 1, 1 / 3),
        (torch.eye(3)[1].expand(5, 4, 3), [0, 1, 0], 0, 1),
        (torch.eye(3)[:, None].expand(3, 4, 3), [1 / 3] * 3, 0, 1),  # entropy per query, not of the mean
        (torch.ones(4, 4, 1), [1], 0, 1),
    ],
    ids=["even", "one", "one per query", "pool of one"],
)
def test_component_entropy(weights: Tensor, usage: list[float], entropy: float, largest: float) -> None:
    found = component_usage(Fixed(weights={0: weights, 3: weights}), normal(len(weights), WIDTH))
    assert found is not None and found["blocks"] == [0, 3]
    assert found["usage"][1] == pytest.approx(usage)
    assert found["entropy"] == pytest.approx([entropy] * 2)
    assert found["max_weight"] == pytest.approx([largest] * 2)


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
