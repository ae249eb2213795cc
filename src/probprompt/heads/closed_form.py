"""Heads in closed form: they add up sums over images, in float64, and are solved from them.

After any sequence of tasks they equal the head of all those images at once, whatever the order, as long as the
features of an image stay the same. No image is kept.
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
"""What the strength of the ridge is chosen from."""
STRIP = 256  # rows that are saved together of half a matrix
CHUNK = 2**23  # numbers of an intermediate result in float64: 64 MB


class _ProjectionSettings(HeadSettings):
    projections: int = Field(2000, ge=0)
    """Random ReLU projections under the ridge head; 0 takes the features as they are."""
    ridge: float | None = Field(None, gt=0, allow_inf_nan=False)
    """lambda of the ridge head; None chooses it on held-out images."""
    ridge_choice: Literal["first", "every", "last"] = "first"
    """Images that choose lambda: a fifth of the first task's; after every task, a fifth of all tasks' so far, each
    judged when it came; or, as in RanPAC's code, a fifth of the last task's. What suits few classes is too much
    later."""


class ClosedFormSettings(HeadSettings):
    """What all heads in closed form can read of an image."""

    with_query: bool = False
    """Whether a head in closed form also sees the query, which is computed anyway: what the backbone says without
    prompts then stands beside what it says with them."""
    layers: int = Field(0, ge=0)
    """Of how many blocks before the last a head in closed form also reads the class token and the mean of the patches,
    under prompts and each normalised."""
    intermediate: Literal["unprojected", "projected"] = "unprojected"
    """Whether the ridge head takes them as they are, beside its projections, or projects them with the feature."""
    flip_average: bool = False
    """Whether a head in closed form is given the mean of what is read of an image and of its mirror image, wherever it
    learns or predicts: twice the work of both, and less chance in a feature. The query is the image's own."""
    flip_augment: bool = False
    """Whether a head in closed form also learns the mirror image of every image, as one more image of its class: twice
    the passes of learning, and no more work at prediction."""
    compensate_drift: bool = False
    """Whether the sums of a head in closed form follow where prompts that learn in several tasks
    (``training.adapt_tasks``) move the features: by the linear map from what the head made of the new task's images
    before to what it makes of them after it."""

    @model_validator(mode="after")
    def _check_views(self) -> Self:
        if self.flip_average and self.flip_augment:
            raise ValueError("head.flip_average takes in mirror images already: set it or head.flip_augment, not both")
        return self

    def input_width(self, width: int) -> int:
        """Return the width of a feature, the query, then the readings of blocks.

        >>> LDASettings(with_query=True, layers=3).input_width(10)
        80
        """
        return width * (1 + self.with_query + 2 * self.layers)


class RidgeSettings(ClosedFormSettings, _ProjectionSettings):  # recorded in the order of the second
    """Ridge regression on random projections, as RanPAC."""

    kind: Literal["ridge"] = "ridge"

    def unprojected_width(self, width: int) -> int:
        """Return the width of the readings that stand next to the projections.

        >>> RidgeSettings(layers=3).unprojected_width(10)
        60
        """
        return 2 * self.layers * width if self.intermediate == "unprojected" else 0


class LDASettings(ClosedFormSettings):
    """Linear discriminant analysis with one covariance for all classes."""

    kind: Literal["lda"] = "lda"
    shrinkage: float = Field(1e-3, gt=0, le=1)
    """How far the covariance of the LDA head is drawn towards its mean diagonal."""


class NearestMeanSettings(ClosedFormSettings):
    """The class whose mean feature has the smallest angle with the feature."""

    kind: Literal["nearest-mean"] = "nearest-mean"


class ClosedFormHead(Head):
    """A head solved from sums over images."""

    trained = False
    totals: ClassVar[str]
    """Its sums of what an image is lifted to, by class (C, L)."""
    moments: ClassVar[str | None] = None
    """Its sums of squares of that (L, L), if it has them."""

    def __init__(self, width: int, seed: int, inner: int | None = None) -> None:
        super().__init__(width, seed)
        self.inner = inner or width  # L: the width of what is added up
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
        """Further arguments of a head, from its settings."""
        return ()

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float64 if name in self.learning_only else torch.float32

    def grow(self, classes: int) -> Self:
        """Make room for so many new classes, without any image of them yet."""
        self._check_complete()
        for name, shape in self.shapes(len(self) + classes).items():
            old = self.get_buffer(name)
            if tuple(old.shape) != shape:
                room = old.new_zeros(shape)
                room[tuple(map(slice, old.shape))] = old
                self.register_buffer(name, room)
        return self

    def saved(self) -> dict[str, Tensor]:
        """What :meth:`restore` takes, by name: of sums of squares only one half, since the other is the same."""
        found = super().saved()
        if self.moments in found:
            found[self.moments] = _half(found[self.moments])
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take over saved tensors, whatever their number of classes; sums of squares may be halved or whole."""
        tensors = dict(tensors)
        if self.moments in tensors and tensors[self.moments].ndim == 1:
            rows = self.shapes(len(tensors.get("weight", ())))[self.moments][0]
            tensors[self.moments] = _whole(tensors[self.moments], rows)
        return super().restore(tensors)

    @torch.no_grad()
    def learn(self, features: Tensor, labels: Tensor, classes: int, task_key: randomness.Key) -> None:
        """Grow by so many classes and learn images: features (n, D), labels (n,) counting all classes seen.

        With no new class, the images refine known ones. ``task_key`` keys what is drawn at random for this task.
        Features may also be of several views of each image, (n, V, D): all count as images, but what is chosen on
        held-out images is judged by the first view of images of which no view was learned.
        """
        self._check_complete()
        features = features if features.ndim == 3 else features[:, None]
        if not bool(features.isfinite().all()):
            raise ValueError("features are not all finite: sums over them would be lost for good")
        found = labels.unique().tolist()
        absent = sorted(set(range(len(self), len(self) + classes)) - set(found))
        if absent or (found and not 0 <= found[0] <= found[-1] < len(self) + classes):
            raise ValueError(
                f"labels {found} do not fit {len(self)} known and {classes} new classes: without images {absent}"
            )
        self.grow(classes)
        self._add(features, labels, task_key)
        self._solve()

    @torch.no_grad()
    def lift(self, features: Tensor) -> Tensor:
        """What the sums are over, of features (n, D): (n, L)."""
        return features

    @torch.no_grad()
    def solve_sums(self, counts: Tensor, totals: Tensor, moment: Tensor, solve: bool = True) -> Self:
        """Replace its own sums by others and solve them: counts (C,), sums of :meth:`lift` (C, L), of squares (L, L).

        Without ``solve`` the weights stay as they are, for a head that is about to learn.
        """
        for name, value in self._named_sums(counts, totals, moment).items():
            self.register_buffer(name, value.to(self.weight.device, torch.float64, copy=True))
        if solve:
            self._solve()
        return self

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        """Which of these sums it keeps, by their names here."""
        raise NotImplementedError

    @torch.no_grad()
    def follow(self, before: Tensor, after: Tensor, task_key: randomness.Key) -> None:
        """Move the sums as the features of some images have moved, from (n, D) to (n, D); solve nothing yet.

        What the sums are over is taken to have moved by a linear map: by a ridge regression of the difference on what
        was before, whose strength is chosen on a fifth of the images. So nothing moves where nothing can be predicted.
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
        errors = [(old[held_out] @ found - change[held_out]).square().sum(dim=1) for found in maps]
        strength = STRENGTHS[int(torch.stack(errors).mean(dim=1).argmin())]
        (moved,) = _regressions(old, change, (strength,))
        moved.diagonal().add_(1)
        self.register_buffer(self.totals, self.get_buffer(self.totals) @ moved)
        if self.moments:
            whole = symmetric(self.get_buffer(self.moments))  # a solve reads but one half, which alone is saved
            self.register_buffer(self.moments, moved.T @ whole @ moved)

    def _check_complete(self) -> None:
        if any(self._buffers.get(name, ...) is None for name in self.learning_only):
            raise ValueError(f"this {type(self).__name__} was loaded without its sums: it predicts, but cannot learn")

    def _take(self, tensors: Mapping[str, Tensor | None]) -> None:
        device = self.weight.device
        for name, value in tensors.items():  # what is None is neither held nor saved any more
            self.register_buffer(name, None if value is None else value.to(device, self._dtype(name), copy=True))

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        """Add the sums over these images (n, V, D)."""
        raise NotImplementedError

    def _solve(self) -> None:
        """Make from the sums what prediction needs."""
        raise NotImplementedError

    def _class_sums(self, values: Tensor, labels: Tensor) -> Tensor:
        """Sums per class (C, L) of values (n, L); by a product, whose order of summation is fixed on every device."""
        return nn.functional.one_hot(labels, len(self)).to(values).T @ values


@register
class RidgeHead(ClosedFormHead):
    """Ridge regression of the one-hot classes on random ReLU projections of the features (RanPAC).

    With h = ReLU(f W), G = sum h h^T and C = sum h onehot(y)^T, logits are h (G + lambda I)^-1 C. W is drawn from the
    seed. The last ``untouched`` numbers of a feature are not projected, but stand beside the projections.

    Lambda is chosen once, from powers of ten, by the squared error on a fifth of the first task's images: the
    largest within a standard error of the smallest error. (The smallest itself is a matter of chance where a small task
    is fitted exactly by every small lambda; kept, such a lambda fails the tasks to come.) That needs two classes of two
    images or more: until such a task comes, lambda is a tenth of the mean diagonal of G.

    With ``every`` it is chosen anew after every task: each lambda is tried on a fifth of the new images, solved from
    all others so far, and what it gets wrong is added to that of the tasks before. The largest is taken that is worse
    than the best by no more than the standard error of the difference. (Squared errors prefer larger lambdas than
    right answers do, the more so the more classes there are.) With ``last`` it is the one of the smallest squared error
    on a fifth of the new images, solved from the rest of these alone.

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
        # Drawn from the seed again when a model is loaded, so it need not be stored.
        self.register_buffer("projection", projection, persistent=False)  # (D, L)

    @classmethod
    def _options(cls, settings: HeadSettings, width: int) -> tuple[Any, ...]:
        assert isinstance(settings, RidgeSettings)
        return settings.projections, settings.ridge, settings.unprojected_width(width), settings.ridge_choice

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Weights and correlations (C, L), the Gram matrix (L, L) once there is a class, lambda, and its trials.

        Trials are sums over held-out images of the products of (1, whether it was wrong under each lambda).
        """
        inner = self.inner if classes else 0
        rows, tried = (classes, self.inner), (len(STRENGTHS) + 1,) * 2
        usual = {"weight": rows, "gram": (inner, inner), "correlation": rows, "strength": ()}
        return {**usual, "trials": tried} if self.choice == "every" else usual

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, D)."""
        return nn.functional.linear(self._projected(features.to(self.weight)), self.weight)

    @torch.no_grad()
    def lift(self, features: Tensor) -> Tensor:
        """Random projections (n, L) of features (n, D)."""
        return self._projected(features)

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        return {"gram": moment, "correlation": totals}

    def _projected(self, features: Tensor) -> Tensor:
        if self.projection is None:
            return features  # (B, D)
        projection = self.projection.to(features)
        if not self.untouched:
            return (features @ projection).relu()  # (B, L)
        own = len(projection)  # what is not projected is put on the scale of what is
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
        """Judge every lambda by images that the sums do not have, and choose it by all that were so judged."""
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
        """The solutions of these images by themselves, (L, C), for each strength."""
        if len(labels) < self.inner:
            projected = self._projected(features.double())  # (n, L)
            wanted = nn.functional.one_hot(labels, len(self)).double()  # (n, C)
            return list(_regressions(projected, wanted, STRENGTHS))
        gram, correlation = torch.zeros_like(self.gram), torch.zeros_like(self.correlation)
        self._add_sums(gram, correlation, features, labels)
        return self._solutions(gram, correlation.T)

    def _solutions(self, gram: Tensor, targets: Tensor) -> list[Tensor]:
        """The solutions (L, C) for each strength; those that drown in rounding are one and the same."""
        shifts = [max(strength, _least(gram)) for strength in STRENGTHS]
        found = {shift: _solve(gram, shift, targets) for shift in dict.fromkeys(shifts)}
        return [found[shift] for shift in shifts]

    def _errors(self, features: Tensor, labels: Tensor, weights: list[Tensor]) -> Tensor:
        """Squared errors of several solutions: (solutions, B)."""
        projected, wanted = self._projected(features), nn.functional.one_hot(labels, len(self))  # (B, L), (B, C)
        return torch.stack([(projected @ weight - wanted).square().sum(dim=1) for weight in weights])

    def _held_out(self, labels: Tensor, task_key: randomness.Key) -> Tensor:
        """Draw a fifth of the images of each class, at least one of two: (n,) of booleans."""
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
        """Solve for the weights (C, L) in float64, from the sums alone."""
        strength = float(self.strength)
        if math.isnan(strength):
            strength = 0.1 * float(self.gram.diagonal().mean()) or 1.0
        return _solve(self.gram, strength, self.correlation.T).T.contiguous()


@register
class LDAHead(ClosedFormHead):
    """Linear discriminant analysis: a mean per class, one covariance S for all.

    Logits are x S^-1 mu_c - 1/2 mu_c S^-1 mu_c. S is the covariance within classes, drawn towards its mean diagonal
    (towards the identity where it is zero: one image per class).

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
        """Weights and sums (C, D), biases and counts (C,), and the second moment (D, D)."""
        rows, square = (classes, self.width), (self.width, self.width)
        return {"weight": rows, "bias": (classes,), "sums": rows, "counts": (classes,), "moment": square}

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, D)."""
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
    """The cosine between the feature and the mean of each class.

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
        """Weights and sums (C, D)."""
        return {"weight": (classes, self.width), "sums": (classes, self.width)}

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, D)."""
        return nn.functional.linear(nn.functional.normalize(features.to(self.weight), dim=1), self.weight)

    def _named_sums(self, counts: Tensor, totals: Tensor, moment: Tensor) -> dict[str, Tensor]:
        return {"sums": totals}

    def _add(self, features: Tensor, labels: Tensor, task_key: randomness.Key) -> None:
        for some, of in _chunks(features, labels, self.width):
            self.sums += self._class_sums(some, of)

    def _solve(self) -> None:
        self.weight = nn.functional.normalize(self.sums, dim=1).float()  # the mean has the direction of the sum


def _half(square: Tensor) -> Tensor:
    """The lower half of a symmetric matrix (L, L), with a little more: strips of rows up to the diagonal, end to end.

    >>> _half(torch.eye(2))
    tensor([1., 0., 0., 1.])
    """
    strips = [symmetric(square[start : start + STRIP, : start + STRIP]) for start in range(0, len(square), STRIP)]
    return torch.cat([strip.flatten() for strip in strips]) if strips else square.flatten()


def _whole(half: Tensor, size: int) -> Tensor:
    """The matrix (L, L) that a half was taken of.

    >>> _whole(_half(torch.eye(2)), 2).tolist() == torch.eye(2).tolist()
    True
    """
    areas = [(start, min(start + STRIP, size)) for start in range(0, size, STRIP)]
    if half.numel() != sum((stop - start) * stop for start, stop in areas):
        raise ValueError(f"{half.numel()} numbers are not half a matrix of {size} rows")
    square, strips = half.new_zeros(size, size), half.split([(stop - start) * stop for start, stop in areas])
    for (start, stop), strip in zip(areas, strips, strict=True):
        square[start:stop, :stop] = strip.view(stop - start, stop)
    return symmetric(square)


def symmetric(rows: Tensor) -> Tensor:
    """The last rows of a lower triangle, (n, L), with its mirror image on the other side of the diagonal: a copy.

    >>> symmetric(torch.tensor([[5, 1, 0], [6, 2, 3]]))
    tensor([[5, 1, 2],
            [6, 2, 3]])
    """
    found, corner = rows.clone(), rows[:, rows.shape[1] - len(rows) :].tril()  # (n, L), (n, n)
    found[:, rows.shape[1] - len(rows) :] = corner + corner.tril(-1).T
    return found


def _one_by_one(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """All views of images (n, V, D) as images of their own, (n V, D), with their labels."""
    return features.flatten(0, 1), labels.repeat_interleave(features.shape[1])


def _chunks(features: Tensor, labels: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images (n, D), or all their views (n, V, D), in float64, so few at a time that (images, width) stays small."""
    size = max(1, CHUNK // width)
    if features.ndim == 3:
        features, labels = _one_by_one(features, labels)
    for some, of in zip(features.split(size), labels.split(size), strict=True):
        yield some.double(), of


def _regressions(given: Tensor, wanted: Tensor, strengths: Iterable[float]) -> Iterator[Tensor]:
    """Ridge regressions of what is wanted (n, K) on what is given (n, L), both in float64: (L, K) for each strength."""
    if len(given) < given.shape[1]:  # the same solutions from a smaller matrix, one image against another
        kernel = given @ given.T  # (n, n)
        yield from (given.T @ _solve(kernel, strength, wanted) for strength in strengths)
    else:
        gram, targets = given.T @ given, given.T @ wanted  # (L, L), (L, K)
        yield from (_solve(gram, strength, targets) for strength in strengths)


def _solve(matrix: Tensor, shift: float, targets: Tensor) -> Tensor:
    """Solve (matrix + shift I) X = targets in float64, for a matrix without negative eigenvalues."""
    shifted = matrix.clone()
    shifted.diagonal().add_(max(shift, _least(matrix)))
    return torch.cholesky_solve(targets, torch.linalg.cholesky(shifted))


def _least(matrix: Tensor) -> float:
    """A smaller shift than this would drown in the rounding of the largest eigenvalue."""
    return len(matrix) * torch.finfo(matrix.dtype).eps * float(matrix.trace())


def _largest_good(errors: Tensor) -> int:
    """The last candidate whose mean error (candidates, n) is within a standard error of the smallest.

    >>> _largest_good(torch.tensor([[1.0, 3.0], [0.5, 2.5], [1.0, 4.0], [9.0, 9.0]]))
    2
    """
    mean = errors.mean(dim=1)  # (candidates,)
    best = int(mean.argmin())
    bar = mean[best] + errors[best].std() / math.sqrt(errors.shape[1])
    return int((mean <= bar).nonzero().max())


def _largest_as_good(trials: Tensor) -> int:
    """The last candidate that is worse than the best by no more than the standard error of that difference.

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
