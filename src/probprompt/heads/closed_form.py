"""Closed-form heads, solved from float64 statistics that are summed over images.

After any sequence of tasks they equal the head fitted to all images jointly, in any order, as long as the features of
an image do not change. No image is stored.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from probprompt import randomness
from probprompt.heads.head import Head, HeadSettings, register

STRENGTHS = tuple(10.0**power for power in range(-6, 10))
"""Candidates for the ridge penalty."""
STRIP = 256  # rows of a half matrix per saved strip
CHUNK = 2**23  # float64 numbers in an intermediate result: 64 MB


class _ProjectionSettings(HeadSettings):
    projections: int = Field(2000, ge=0)
    """Number of random ReLU projections below the ridge head; 0 for none."""
    ridge: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Ridge penalty λ. None: chosen on held-out images."""
    ridge_choice: Literal["first", "every", "last"] = "first"
    """Images that choose λ: a fifth of the first task (``first``), of all tasks so far, each measured when it came
    (``every``), or of the last task, as in RanPAC's code (``last``). A penalty that suits few classes is too large
    for many."""


class ClosedFormSettings(HeadSettings):
    """Image features that all closed-form heads can read."""

    with_query: bool = False
    """Also read the query, the feature without prompts, which is computed anyway."""
    layers: int = Field(0, ge=0)
    """Number of intermediate blocks whose class token and mean patch token the head also reads, with prompts, each
    normalized."""
    intermediate: Literal["unprojected", "projected"] = "unprojected"
    """Read intermediate features next to the projections of the ridge head, or project them with the feature."""
    flip_average: bool = False
    """Average features over an image and its horizontal flip in training and prediction: twice the work,
    less noise. The query is the image's own."""
    flip_augment: bool = False
    """Learn the horizontal flip of every training image as one more image: twice the passes of training,
    no more work at prediction."""
    compensate_drift: bool = False
    """Correct the statistics if several tasks train prompts (``training.adapt_tasks``), by the linear map
    from the features of the new task's images before training to those after it."""

    @model_validator(mode="after")
    def _check_views(self) -> Self:
        if self.flip_average and self.flip_augment:
            raise ValueError("head.flip_average cannot be combined with head.flip_augment.")
        return self

    def input_width(self, width: int) -> int:
        """Return the width of a feature, the query, then intermediate features.

        >>> LDASettings(with_query=True, layers=3).input_width(10)
        80
        """
        return width * (1 + self.with_query + 2 * self.layers)


class RidgeSettings(ClosedFormSettings, _ProjectionSettings):  # recorded in the order of the second
    """Ridge regression on random projections, as RanPAC."""

    kind: Literal["ridge"] = "ridge"

    def unprojected_width(self, width: int) -> int:
        """Return the width of intermediate features next to the projections.

        >>> RidgeSettings(layers=3).unprojected_width(10)
        60
        """
        return 2 * self.layers * width if self.intermediate == "unprojected" else 0


class LDASettings(ClosedFormSettings):
    """Linear discriminant analysis with one covariance for all classes."""

    kind: Literal["lda"] = "lda"
    shrinkage: float = Field(1e-3, gt=0, le=1)
    """Weight of the mean diagonal in the covariance."""


class NearestMeanSettings(ClosedFormSettings):
    """Nearest class mean by cosine."""

    kind: Literal["nearest-mean"] = "nearest-mean"


class ClosedFormHead(Head):
    """A head solved from class statistics."""

    trained = False
    totals: ClassVar[str]
    """Name of the sums of lifted features by class (C, L)."""
    moments: ClassVar[str | None] = None
    """Name of the second moment of lifted features (L, L), if any."""

    def __init__(self, width: int, seed: int, inner: int | None = None) -> None:
        super().__init__(width, seed)
        self.inner = inner or width  # L: the width of lifted features
        for name, shape in self.shapes(0).items():
            self.register_buffer(name, torch.zeros(shape, dtype=self._dtype(name)))

    @classmethod
    def create(cls, settings: HeadSettings, width: int, seed: int) -> Self:
        """Build the head with its settings."""
        assert isinstance(settings, ClosedFormSettings)
        head = cls(settings.input_width(width), seed, *cls._options(settings, width))
        head.layers, head.flip_average = settings.layers, settings.flip_average
        return head

    @classmethod
    def _options(cls, settings: HeadSettings, width: int) -> tuple[Any, ...]:
        """Return further arguments of the constructor."""
        return ()

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float64 if name in self.learning_only else torch.float32

    def grow(self, classes: int) -> Self:
        """Add ``classes`` new classes without images."""
        self._check_complete()
        for name, shape in self.shapes(len(self) + classes).items():
            old = self.get_buffer(name)
            if tuple(old.shape) != shape:
                room = old.new_zeros(shape)
                room[tuple(map(slice, old.shape))] = old
                self.register_buffer(name, room)
        return self

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors for :meth:`restore` by name; of second moments only the lower half."""
        tensors = super().saved()
        if self.moments in tensors:
            tensors[self.moments] = _half(tensors[self.moments])
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Load saved tensors of any number of classes; second moments may be halved or whole."""
        tensors = dict(tensors)
        if self.moments in tensors and tensors[self.moments].ndim == 1:
            rows = self.shapes(len(tensors.get("weight", ())))[self.moments][0]
            tensors[self.moments] = _whole(tensors[self.moments], rows)
        return super().restore(tensors)

    @torch.no_grad()
    def learn(self, features: Tensor, labels: Tensor, classes: int, task_key: randomness.Key) -> None:
        """Add ``classes`` new classes and learn images: features (n, D), labels (n,).

        Labels count all classes seen. With no new class, the images refine known ones. ``task_key`` keys the task's
        random draws. Features may also be of several views of each image, (n, V, D): all count as images, but held-out
        images are measured by their first view, and none of their views is learned.
        """
        self._check_complete()
        features = features if features.ndim == 3 else features[:, None]
        if not bool(features.isfinite().all()):
            raise ValueError("Features contain NaN or infinity, which would destroy the statistics.")
        present = labels.unique().tolist()
        absent = sorted(set(range(len(self), len(self) + classes)) - set(present))
        if absent or (present and not 0 <= present[0] <= present[-1] < len(self) + classes):
            raise ValueError(
                f"Labels {present} do not match {len(self)} known and {classes} new classes; no images of {absent}."
            )
        self.grow(classes)
        self._add(features, labels, task_key)
        self._solve()

    @torch.no_grad()
    def lift(self, features: Tensor) -> Tensor:
        """Return lifted features ``(n, L)`` of features ``(n, D)``."""
        return features

    @torch.no_grad()
    def solve_sums(self, counts: Tensor, totals: Tensor, moment: Tensor, solve: bool = True) -> Self:
        """Replace the statistics: counts (C,), sums of :meth:`lift` (C, L), of squares (L, L).

        Without ``solve`` the weights do not change.
        """
        for name, value in self._named_sums(counts, totals, moment).items():
            self.register_buffer(name, value.to(self.weight.device, torch.float64, copy=True))
        if solve:
            self._solve()
        return self

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        """Return the statistics that this head keeps, by name."""
        raise NotImplementedError

    @torch.no_grad()
    def compensate_drift(self, before: Tensor, after: Tensor, task_key: randomness.Key) -> None:
        """Correct the statistics for features that drifted from (n, D) to (n, D), without solving.

        The drift of lifted features is taken as linear: a ridge regression of the change on the old ones, with a
        penalty chosen on a fifth of the images. Where nothing can be predicted, nothing is corrected.
        """
        self._check_complete()
        old = self.lift(before.double())  # (n, L)
        change = self.lift(after.double()) - old
        held_out = torch.zeros(len(old), dtype=torch.bool, device=old.device)
        order = randomness.permutation(len(old), self.seed, "follow", task_key)
        held_out[order[: max(1, len(old) // 5)].tolist()] = True
        if bool(held_out.all()):
            return
        maps = _regressions(old[~held_out], change[~held_out], STRENGTHS)  # (L, L) each
        errors = [(old[held_out] @ linear - change[held_out]).square().sum(dim=1) for linear in maps]
        strength = STRENGTHS[int(torch.stack(errors).mean(dim=1).argmin())]
        (moved,) = _regressions(old, change, (strength,))
        moved.diagonal().add_(1)
        self.register_buffer(self.totals, self.get_buffer(self.totals) @ moved)
        if self.moments:
            whole = symmetric(self.get_buffer(self.moments))  # only the lower half is up to date
            self.register_buffer(self.moments, moved.T @ whole @ moved)

    def _check_complete(self) -> None:
        if any(self._buffers.get(name, ...) is None for name in self.learning_only):
            raise ValueError(f"This {type(self).__name__} has no statistics: it predicts, but cannot learn.")

    def _take(self, tensors: Mapping[str, Tensor | None]) -> None:
        device = self.weight.device
        for name, value in tensors.items():  # None: no longer held or saved
            self.register_buffer(name, None if value is None else value.to(device, self._dtype(name), copy=True))

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        """Add the statistics of images ``(n, V, D)``."""
        raise NotImplementedError

    def _solve(self) -> None:
        """Solve for the weights."""
        raise NotImplementedError

    def _class_sums(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return sums per class ``(C, L)``, as a product for a fixed order of summation."""
        return nn.functional.one_hot(labels, len(self)).to(values).T @ values


@register
class RidgeHead(ClosedFormHead):
    """Ridge regression of the one-hot classes on random ReLU projections of the features (RanPAC).

    With h = ReLU(f W), G = sum h h^T and C = sum h onehot(y)^T, logits are h (G + lambda I)^-1 C. W is drawn from the
    seed. The last ``untouched`` numbers of a feature are not projected, but follow the projections.

    With ``first``, lambda is chosen once from powers of ten by the squared error on a fifth of the first task's images:
    the largest within a standard error of the minimum. (The minimum itself is noise if every small lambda fits a small
    task exactly, and such a lambda fails later tasks.) This needs two classes of two images or more; until such a task,
    lambda is a tenth of the mean diagonal of G.

    With ``every``, lambda is chosen after every task. Each candidate is solved from all other images and tested on a
    fifth of the new ones, and its errors are added to those of earlier tasks. The result is the largest lambda whose
    excess over the minimum is within its standard error. (Squared errors prefer larger lambdas than accuracy does, and
    more so with more classes.) With ``last``, it is the minimum of the squared error on a fifth of the new images,
    solved from the rest of them.

    >>> head = RidgeHead(width=2, seed=0, projections=0, ridge=1.0)
    >>> head.learn(torch.eye(2), torch.tensor([0, 1]), classes=2, task_key=0)
    >>> head(torch.eye(2))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    Settings = RidgeSettings
    learning_only = frozenset({"gram", "correlation", "strength", "trials"})
    totals, moments = "correlation", "gram"
    gram: Tensor
    correlation: Tensor
    strength: Tensor
    trials: Tensor
    projection: Tensor | None

    def __init__(
        self,
        width: int,
        seed: int,
        projections: int = 2000,
        ridge: float | None = None,
        untouched: int = 0,
        choice: str = "first",
    ) -> None:
        self.choice = choice if ridge is None else "first"
        super().__init__(width, seed, projections + untouched if projections else width)
        self.strength.fill_(math.nan if ridge is None else ridge)
        self.untouched = untouched
        projection = randomness.normal((width - untouched, projections), seed, "projection") if projections else None
        # Drawn from the seed when a model is loaded, so it is not stored.
        self.register_buffer("projection", projection, persistent=False)  # (D, L)

    @classmethod
    def _options(cls, settings: HeadSettings, width: int) -> tuple[Any, ...]:
        assert isinstance(settings, RidgeSettings)
        return settings.projections, settings.ridge, settings.unprojected_width(width), settings.ridge_choice

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return shapes: weights and correlations (C, L), Gram matrix, lambda, and trials.

        Trials are sums over held-out images of the products of (1, error under each lambda).
        """
        inner = self.inner if classes else 0
        rows, tried = (classes, self.inner), (len(STRENGTHS) + 1,) * 2
        usual = {"weight": rows, "gram": (inner, inner), "correlation": rows, "strength": ()}
        return {**usual, "trials": tried} if self.choice == "every" else usual

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features ``(B, D)``."""
        return nn.functional.linear(self._projected(features.to(self.weight)), self.weight)

    @torch.no_grad()
    def lift(self, features: Tensor) -> Tensor:
        """Return random projections ``(n, L)`` of features ``(n, D)``."""
        return self._projected(features)

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        return {"gram": moment, "correlation": totals}

    def _projected(self, features: Tensor) -> Tensor:
        if self.projection is None:
            return features  # (B, D)
        projection = self.projection.to(features)
        if not self.untouched:
            return (features @ projection).relu()  # (B, L)
        own = len(projection)  # unprojected features get the scale of projected ones
        return torch.cat([(features[:, :own] @ projection).relu(), math.sqrt(own) * features[:, own:]], dim=1)

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        if self.choice == "every" and len(self) > 1:
            held_out = self._held_out(labels, task_key)
            self._add_sums(self.gram, self.correlation, features[~held_out], labels[~held_out])
            self._try(features[held_out, 0], labels[held_out])
            features, labels = features[held_out], labels[held_out]
        elif self.choice == "last" or bool(self.strength.isnan()):
            self._choose(features, labels, self._held_out(labels, task_key))
        self._add_sums(self.gram, self.correlation, features, labels)

    def _add_sums(self, gram: Tensor, correlation: Tensor, features: Tensor, labels: Tensor) -> None:
        """Add G (L, L) and C^T (C, L) of these images."""
        for some, of in _chunks(features, labels, self.inner):
            projected = self._projected(some)  # (chunk, L)
            gram += projected.T @ projected
            correlation += self._class_sums(projected, of)

    def _try(self, features: Tensor, labels: Tensor) -> None:
        """Test every lambda on images outside the statistics, and choose one by all tests so far."""
        if not len(labels):
            return
        weights = self._solutions(self.gram, self.correlation.T)  # (L, C) each
        for some, of in _chunks(features, labels, self.inner):
            projected = self._projected(some)  # (B, L)
            wrong = torch.stack([(projected @ weight).argmax(dim=1) != of for weight in weights]).to(self.trials)
            padded = torch.cat([torch.ones_like(wrong[:1]), wrong])  # (1 + strengths, B)
            self.trials += padded @ padded.T
        if bool(self.trials[0, 0] > 1):
            self.strength.fill_(STRENGTHS[_largest_as_good(self.trials)])

    def _choose(self, features: Tensor, labels: Tensor, held_out: Tensor) -> None:
        """Choose lambda, if images of two classes or more are held out (n,)."""
        if len(labels[held_out].unique()) < 2:
            return
        weights = self._candidates(*_one_by_one(features[~held_out], labels[~held_out]))  # (L, C) each
        images = _chunks(features[held_out, 0], labels[held_out], self.inner)
        errors = torch.cat([self._errors(some, of, weights) for some, of in images], dim=1)  # (strengths, held out)
        best = int(errors.mean(dim=1).argmin()) if self.choice == "last" else _largest_good(errors)
        self.strength.fill_(STRENGTHS[best])

    def _candidates(self, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the solutions ``(L, C)`` of only these images for each penalty."""
        if len(labels) < self.inner:
            projected = self._projected(features.double())  # (n, L)
            targets = nn.functional.one_hot(labels, len(self)).double()  # (n, C)
            return list(_regressions(projected, targets, STRENGTHS))
        gram, correlation = torch.zeros_like(self.gram), torch.zeros_like(self.correlation)
        self._add_sums(gram, correlation, features, labels)
        return self._solutions(gram, correlation.T)

    def _solutions(self, gram: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the solutions ``(L, C)`` for each penalty, equal below rounding."""
        shifts = [max(strength, _least(gram)) for strength in STRENGTHS]
        solutions = {shift: _solve(gram, shift, targets) for shift in dict.fromkeys(shifts)}
        return [solutions[shift] for shift in shifts]

    def _errors(self, features: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """Return squared errors of several solutions: (solutions, B)."""
        projected, targets = self._projected(features), nn.functional.one_hot(labels, len(self))  # (B, L), (B, C)
        return torch.stack([(projected @ weight - targets).square().sum(dim=1) for weight in weights])

    def _held_out(self, labels: Tensor, task_key: randomness.Key) -> Tensor:
        """Draw a mask (n,) of a fifth of the images of each class, at least one of two."""
        held_out = torch.zeros_like(labels, dtype=torch.bool)
        for label in labels.unique().tolist():
            places = (labels == label).nonzero()[:, 0]  # (images of the class,)
            count = max(round(len(places) / 5), int(len(places) > 1))
            order = randomness.permutation(len(places), self.seed, "ridge", task_key, label)
            held_out[places[order[:count].tolist()]] = True
        return held_out

    def _solve(self) -> None:
        self.weight = self.solution().float()

    def solution(self) -> Tensor:
        """Solve for the weights ``(C, L)`` in float64."""
        strength = float(self.strength)
        if math.isnan(strength):
            strength = 0.1 * float(self.gram.diagonal().mean()) or 1.0
        return _solve(self.gram, strength, self.correlation.T).T.contiguous()


@register
class LDAHead(ClosedFormHead):
    """Linear discriminant analysis: a mean per class, one covariance S for all.

    Logits are x S^-1 mu_c - 1/2 mu_c S^-1 mu_c. S is the within-class covariance, shrunk towards its mean diagonal
    (towards the identity if it is zero, with one image per class).

    >>> head = LDAHead(width=1, seed=0, shrinkage=1.0)
    >>> head.learn(torch.tensor([[-2.0], [0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1, 1]), classes=2, task_key=0)
    >>> head(torch.tensor([[1.0]]))
    tensor([[-1.5000, -1.5000]])
    """

    Settings = LDASettings
    learning_only = frozenset({"sums", "counts", "moment"})
    totals, moments = "sums", "moment"
    sums: Tensor
    counts: Tensor
    moment: Tensor
    bias: Tensor

    def __init__(self, width: int, seed: int, shrinkage: float = 1e-3) -> None:
        super().__init__(width, seed)
        self.shrinkage = shrinkage

    @classmethod
    def _options(cls, settings: HeadSettings, width: int) -> tuple[Any, ...]:
        assert isinstance(settings, LDASettings)
        return (settings.shrinkage,)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return shapes: weights and sums (C, D), biases and counts (C,), second moment (D, D)."""
        rows, square = (classes, self.width), (self.width, self.width)
        return {"weight": rows, "bias": (classes,), "sums": rows, "counts": (classes,), "moment": square}

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features ``(B, D)``."""
        return nn.functional.linear(features.to(self.weight), self.weight, self.bias)

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        return {"counts": counts, "sums": totals, "moment": moment}

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        for some, of in _chunks(features, labels, self.width):
            self.sums += self._class_sums(some, of)
            self.moment += some.T @ some
        self.counts += features.shape[1] * labels.bincount(minlength=len(self))

    def _solve(self) -> None:
        mean = self.sums / self.counts.clamp(min=1)[:, None]  # (C, D)
        covariance = (self.moment - self.sums.T @ mean) / self.counts.sum()  # (D, D)
        diagonal = float(covariance.diagonal().mean())
        floor = self.shrinkage * diagonal if diagonal > 0 else 1.0
        weight = _solve((1 - self.shrinkage) * covariance, floor, mean.T).T  # (C, D)
        self.weight = weight.float().contiguous()
        self.bias = (-(weight * mean).sum(dim=1) / 2).float()  # (C,)


@register
class NearestMeanHead(ClosedFormHead):
    """Cosine between the feature and the mean of each class.

    >>> head = NearestMeanHead(width=2, seed=0)
    >>> head.learn(torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 3.0]]), torch.tensor([0, 0, 1]), 2, task_key=0)
    >>> head(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    Settings = NearestMeanSettings
    learning_only = frozenset({"sums"})
    totals = "sums"
    sums: Tensor

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return shapes: weights and sums (C, D)."""
        return {"weight": (classes, self.width), "sums": (classes, self.width)}

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features ``(B, D)``."""
        return nn.functional.linear(nn.functional.normalize(features.to(self.weight), dim=1), self.weight)

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        return {"sums": totals}

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        for some, of in _chunks(features, labels, self.width):
            self.sums += self._class_sums(some, of)

    def _solve(self) -> None:
        self.weight = nn.functional.normalize(self.sums, dim=1).float()  # the mean has the direction of the sum


def _half(square: Tensor) -> Tensor:
    """Return the lower half of a symmetric matrix ``(L, L)`` as strips up to the diagonal.

    >>> _half(torch.eye(2))
    tensor([1., 0., 0., 1.])
    """
    strips = [symmetric(square[start : start + STRIP, : start + STRIP]) for start in range(0, len(square), STRIP)]
    return torch.cat([strip.flatten() for strip in strips]) if strips else square.flatten()


def _whole(half: Tensor, size: int) -> Tensor:
    """Return the matrix ``(L, L)`` of a half.

    >>> _whole(_half(torch.eye(2)), 2).tolist() == torch.eye(2).tolist()
    True
    """
    areas = [(start, min(start + STRIP, size)) for start in range(0, size, STRIP)]
    if half.numel() != sum((stop - start) * stop for start, stop in areas):
        raise ValueError(f"{half.numel()} numbers are not half a matrix of {size} rows.")
    square, strips = half.new_zeros(size, size), half.split([(stop - start) * stop for start, stop in areas])
    for (start, stop), strip in zip(areas, strips, strict=True):
        square[start:stop, :stop] = strip.view(stop - start, stop)
    return symmetric(square)


def symmetric(rows: Tensor) -> Tensor:
    """Complete the last rows of a lower triangle, ``(n, L)``, by symmetry, in a copy.

    >>> symmetric(torch.tensor([[5, 1, 0], [6, 2, 3]]))
    tensor([[5, 1, 2],
            [6, 2, 3]])
    """
    result, corner = rows.clone(), rows[:, rows.shape[1] - len(rows) :].tril()  # (n, L), (n, n)
    result[:, rows.shape[1] - len(rows) :] = corner + corner.tril(-1).T
    return result


def _one_by_one(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return all views of images ``(n, V, D)`` as images ``(n V, D)``, with their labels."""
    return features.flatten(0, 1), labels.repeat_interleave(features.shape[1])


def _chunks(features: Tensor, labels: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images ``(n, D)`` or views ``(n, V, D)`` in float64, in chunks of limited size."""
    size = max(1, CHUNK // width)
    if features.ndim == 3:
        features, labels = _one_by_one(features, labels)
    for some, of in zip(features.split(size), labels.split(size), strict=True):
        yield some.double(), of


def _regressions(given: Tensor, wanted: Tensor, strengths: Iterable[float]) -> Iterator[Tensor]:
    """Return ridge regressions of targets (n, K) on inputs (n, L): (L, K) per penalty."""
    if len(given) < given.shape[1]:  # the same solutions from a smaller matrix over images
        kernel = given @ given.T  # (n, n)
        yield from (given.T @ _solve(kernel, strength, wanted) for strength in strengths)
    else:
        gram, targets = given.T @ given, given.T @ wanted  # (L, L), (L, K)
        yield from (_solve(gram, strength, targets) for strength in strengths)


def _solve(matrix: Tensor, shift: float, targets: Tensor) -> Tensor:
    """Solve (matrix + shift I) X = targets in float64, for a positive semidefinite matrix."""
    shifted = matrix.clone()
    shifted.diagonal().add_(max(shift, _least(matrix)))
    return torch.cholesky_solve(targets, torch.linalg.cholesky(shifted))


def _least(matrix: Tensor) -> float:
    """Return the smallest shift above the rounding of the largest eigenvalue."""
    return len(matrix) * torch.finfo(matrix.dtype).eps * float(matrix.trace())


def _largest_good(errors: Tensor) -> int:
    """Return the last candidate (candidates, n) within a standard error of the smallest error.

    >>> _largest_good(torch.tensor([[1.0, 3.0], [0.5, 2.5], [1.0, 4.0], [9.0, 9.0]]))
    2
    """
    mean = errors.mean(dim=1)  # (candidates,)
    best = int(mean.argmin())
    bar = mean[best] + errors[best].std() / math.sqrt(errors.shape[1])
    return int((mean <= bar).nonzero().max())


def _largest_as_good(trials: Tensor) -> int:
    """Return the last candidate whose excess over the best is within its standard error.

    trials: sums over n images of the products of (1, error of each candidate), (1 + candidates,) squared.

    >>> errors = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 3.1], [1.1, 3.2, 1.1, 3.2], [0.0, 2.0, 0.4, 2.0]])
    >>> _largest_as_good(errors @ errors.T), _largest_as_good(errors[:3] @ errors[:3].T)
    (2, 0)
    """
    count, total, products = trials[0, 0], trials[0, 1:], trials[1:, 1:]
    mean = total / count  # (candidates,)
    best = int(mean.argmin())
    own = products.diagonal()
    worse = mean - mean[best]
    variance = (own + own[best] - 2 * products[best]) / count - worse.square()
    return int((worse <= (variance.clamp(min=0) / count).sqrt()).nonzero().max())
