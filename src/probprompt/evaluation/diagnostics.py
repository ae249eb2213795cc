"""Diagnostics of prompts (similarity, rank, use of components) and a map of queries."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probprompt import randomness
from probprompt.engine.scorer import Scorer
from probprompt.methods import EVALUATION, Context, Method, Prompted
from probprompt.prompts import ClassTokenShift, Prompt, Tokens

QUERIES = 128  # batch size of queries
POINTS = 300  # most embedded queries; exact t-SNE is quadratic
SWAPPED = 512  # most images that are predicted with other prompts
FEWEST = 10  # distinct points below which PCA replaces t-SNE


def injected_tokens(method: Method, queries: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    """Return the tokens injected for queries, per block (slots, B, W): keys, then values."""
    prompts = method.prompts(queries if method.needs_query else None, context).prompts
    tokens = {}
    for block, prompt in prompts.items():
        if isinstance(prompt, Tokens):
            both = prompt.tokens  # (B, slots, W), or (slots, W) when shared
        elif isinstance(prompt, ClassTokenShift):
            both = torch.stack([prompt.key, prompt.value], dim=-2)
        else:
            both = torch.cat([prompt.key, prompt.value], dim=-2)
        tokens[block] = both.expand(len(queries), *both.shape[-2:]).transpose(0, 1)
    return tokens


def similarity(tokens: dict[int, Tensor]) -> Tensor:
    """Return cosines of the prompts of queries, averaged over blocks and slots: (B, B)."""
    every = torch.nn.functional.normalize(torch.cat(list(tokens.values())).double(), dim=-1)  # (slots, B, W)
    return (every @ every.mT).mean(dim=0)


def mean_pairwise(matrix: Tensor) -> float:
    """Average over pairs of different queries.

    >>> mean_pairwise(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    0.5
    """
    count = len(matrix)
    return float((matrix.sum() - matrix.trace()) / max(1, count * (count - 1)))


def effective_rank(tokens: dict[int, Tensor]) -> float:
    """Return the number of directions that prompts span, 1 if all queries get the same prompt."""
    every = torch.cat(list(tokens.values())).double()  # (slots, B, W)
    tall = every if every.shape[1] <= every.shape[2] else every.mT
    # Eigenvalues of the smaller square are faster than a decomposition, and exact enough.
    values = torch.linalg.eigvalsh(tall @ tall.mT).clamp_min(0).sqrt()  # (slots, min(B, W))
    share = values / values.sum(dim=-1, keepdim=True).clamp_min(1e-30)  # prompts may all be zero
    return float(torch.special.entr(share).sum(dim=-1).exp().mean())


@torch.no_grad()
def prompt_diversity(
    method: Method, fresh: Method, queries: Tensor, labels: list[str], keys: Tensor | None = None
) -> dict[str, Any] | None:
    """Return the similarity of prompts for one query per class; None without prompts."""
    tokens = injected_tokens(method, queries, Context(keys=keys))
    if not tokens:
        return None
    start = injected_tokens(fresh, queries, Context(keys=keys))
    matrix = similarity(tokens)
    return {
        "labels": labels,
        "matrix": [[round(value, 4) for value in row] for row in matrix.tolist()],
        "mean": mean_pairwise(matrix),
        "initial_mean": mean_pairwise(similarity(start)),
        "per_block": {str(block): mean_pairwise(similarity({block: part})) for block, part in tokens.items()},
        "effective_rank": effective_rank(tokens),
        "initial_effective_rank": effective_rank(start),
    }


@torch.no_grad()
def component_usage(method: Method, queries: Tensor) -> dict[str, Any] | None:
    """Return how relevance is spread over components, per block; None without components."""
    parts = [method.relevance(batch) for batch in queries.split(QUERIES)]
    weights = {block: torch.cat([part[block] for part in parts]) for block in parts[0]}  # per block (B, M, N)
    if not weights:
        return None
    largest = float(torch.tensor(next(iter(weights.values())).shape[-1]).log().clamp(min=1e-12))
    return {
        "blocks": list(weights),
        "usage": [part.mean(dim=(0, 1)).tolist() for part in weights.values()],
        "entropy": [float(torch.special.entr(part.double()).sum(-1).mean()) / largest for part in weights.values()],
        "max_weight": [float(part.amax(dim=-1).mean()) for part in weights.values()],
    }


@torch.no_grad()
def mean_and_sampled(method: Method, fresh: Method, queries: Tensor) -> dict[str, float]:
    """Return similarity and rank of mean and sampled prompts; ``noise`` is about σ/√N_s."""
    values, keys = dict[str, float](), torch.arange(len(queries), device=queries.device)
    for when, one in (("", method), ("initial_", fresh)):
        mean = injected_tokens(one, queries, Context(sampled=False))
        sampled = injected_tokens(one, queries, Context(sampled=True, keys=keys))
        square = torch.stack([(sampled[block] - mean[block]).square().mean() for block in mean] or [torch.zeros(())])
        noise = float(square.mean().sqrt())
        values |= {f"{when}noise": noise} if noise else {}
        for kind, tokens in (("mean", mean), ("sampled", sampled)):
            if tokens and (kind == "mean" or noise):
                values[f"{when}{kind}_similarity"] = mean_pairwise(similarity(tokens))
                values[f"{when}{kind}_rank"] = effective_rank(tokens)
    return values


@torch.no_grad()
def selection(method: Method, queries: Tensor) -> dict[str, float]:
    """Return how many components lead for over 1% of images, and the largest share."""
    parts = [method.relevance(batch) for batch in queries.split(QUERIES)]
    if not parts or not parts[0]:
        return {}
    weights = torch.cat([torch.cat(list(part.values()), dim=1) for part in parts])  # (B, pools, N)
    first = torch.nn.functional.one_hot(weights.argmax(dim=-1), weights.shape[-1])
    shares = first.double().mean(dim=0)  # (pools, N)
    used = (shares > 0.01).sum(dim=-1).double()
    return {
        "components": float(weights.shape[-1]),
        "components_used": float(used.mean()),
        "largest_share": float(shares.amax(dim=-1).mean()),
    }


@torch.no_grad()
def swap_test(scorer: Scorer, rows: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the accuracy in % with own, another image's and average prompts."""
    model, count = scorer.model, min(SWAPPED, len(rows))
    method, plain = model.method, model.method.prompts
    if not method.needs_query or method.trains_backbone or count < 2:
        return {}
    chosen = torch.from_numpy(randomness.permutation(len(rows), "swap test")[:count]).to(rows.device)
    batches = [rows[part] for part in chosen.tensor_split(-(-count // scorer.batch))]
    prompts = [plain(scorer.queries(batch), model.known(scorer.images.store, batch)).prompts for batch in batches]
    if not any(part.batch for part in prompts[0].values()):
        return {}
    sizes = [len(batch) / count for batch in batches]

    def mean(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.mean(dim=0) * size for part, size in zip(parts, sizes, strict=True)]).sum(dim=0)

    average = {block: _changed([one[block] for one in prompts], mean) for block in prompts[0]}

    def another(query: Tensor | None, context: Context) -> Prompted:
        own = plain(query, context).prompts
        return Prompted({block: _changed([prompt], lambda parts: parts[0].roll(1, 0)) for block, prompt in own.items()})

    def accuracy(logits: Callable[[Tensor], Tensor]) -> float:
        predicted = torch.cat([logits(batch).argmax(dim=1) for batch in batches])
        return 100 * float((predicted == labels[chosen]).double().mean())

    results = {"images": float(count), "own": accuracy(scorer.logits)}
    with mock.patch.object(method, "prompts", another):
        results["swapped"] = accuracy(scorer.computed_logits)
    with mock.patch.object(method, "prompts", lambda *_: Prompted(average)):
        results["average"] = accuracy(scorer.computed_logits)
    return results


def _changed(prompts: list[Prompt], change: Callable[[list[Tensor]], Tensor]) -> Prompt:
    """Combine the tensors of prompts of one kind; a prompt shared by all images is unchanged."""
    first = prompts[0]
    if first.batch is None:
        return first
    names = [part.name for part in fields(first) if isinstance(getattr(first, part.name), Tensor)]
    tensors: dict[str, Any] = {name: change([getattr(prompt, name) for prompt in prompts]) for name in names}
    return replace(first, **tensors)


def pca(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Project points `(n, D)` onto two principal components; missing ones are zero.

    >>> np.abs(pca(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])).round(3)).tolist()
    [[1.414, 0.0], [0.0, 0.0], [1.414, 0.0]]
    """
    from sklearn.decomposition import PCA

    plane = np.zeros((len(points), 2))
    if len(points) and np.ptp(points, axis=0).any():
        components = min(2, *points.shape)
        plane[:, :components] = PCA(components, svd_solver="full").fit_transform(points)
    return plane


def tsne(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Embed points `(n, D)` in the plane by t-SNE."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    # The default method sums in threads, and its results vary with their timing.
    embedding = TSNE(perplexity=perplexity, init="pca", max_iter=500, method="exact", random_state=0)
    plane: NDArray[np.float64] = embedding.fit_transform(points)
    return plane


def query_map(queries: Tensor, labels: Tensor, names: list[str], task: int) -> dict[str, Any]:
    """Embed the queries of a task in the plane, with their classes (Fig. 1a of the paper)."""
    chosen = torch.linspace(0, len(queries) - 1, min(POINTS, len(queries))).round().long().unique()
    points = queries[chosen.to(queries.device)].double().cpu().numpy()
    few = len(np.unique(points, axis=0)) < FEWEST
    return {
        "embedding": "PCA" if few else "t-SNE",
        "points": (pca if few else tsne)(points).round(3).tolist(),
        "labels": labels[chosen.to(labels.device)].tolist(),
        "names": names,
        "task": task,
    }
