"""Mixtures of all pools (Eqs. 2 to 7), without a tensor (B, M, N, D).

Equals :mod:`probprompt.equations`, with a custom backward pass. Sums run in float64 in both.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from probprompt.kernels import usable

Learning = Literal["full", "means", "none"]
"""Targets of the gradient of the weights: means and log_std, only the means, or nothing."""


def mixture(
    query: Tensor,
    mean: Tensor,
    log_std: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    density: bool = False,
    gradient: Learning = "full",
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight the Gaussians of each pool by a query, and match one Gaussian (Eqs. 2 to 7).

    query (B, D), mean and log_std (M, N, D) -> weights (B, M, N), of which all except the ``top_k`` largest are 0, mean
    (B, M, D) and standard deviation (B, M, D) of the mixture, in the dtype of the means. Gradients reach mean and
    log_std: always through the moments, through the weights according to ``gradient``. ``density`` adds the
    log-determinant to the squared distance.

    >>> mean = torch.tensor([[[-1.0], [1.0]]])  # one pool of two Gaussians
    >>> weights, center, std = mixture(torch.zeros(1, 1), mean, torch.zeros(1, 2, 1))
    >>> weights, center, std
    (tensor([[[0.5000, 0.5000]]]), tensor([[[0.]]]), tensor([[[1.4142]]]))
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if top_k is not None and not 1 <= top_k <= mean.shape[1]:
        raise ValueError(f"top_k must be between 1 and {mean.shape[1]}, the size of a pool, got {top_k}.")
    if query.requires_grad:
        raise ValueError("mixture has no gradient for the query. Detach it, or use probprompt.equations.")
    result: tuple[Tensor, Tensor, Tensor] = _Mixture.apply(  # type: ignore[no-untyped-call]
        query, mean, log_std, temperature, top_k, density, gradient
    )
    return result


class _Mixture(torch.autograd.Function):
    """The mixtures with their backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        mean: Tensor,
        log_std: Tensor,
        temperature: float,
        top_k: int | None,
        density: bool,
        gradient: Learning,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weight the Gaussians and match the moments."""
        inverse = torch.exp(-log_std.double())  # (M, N, D), 1/σ
        distances = _distances(query, mean, inverse)  # (B, M, N), S²
        if density:
            distances += 2 * log_std.double().sum(dim=-1)
        weights = _softmax(distances.div_(-temperature), top_k)  # (B, M, N)
        center, std = _moments(weights, mean, inverse.square().reciprocal_())  # (B, M, D)
        ctx.temperature, ctx.density, ctx.gradient = temperature, density, gradient
        ctx.save_for_backward(query, mean, inverse, weights, std)
        return weights.to(mean.dtype), center, std

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Propagate through the moments, the softmax and the distances."""
        query, mean, inverse, weights, std = ctx.saved_tensors
        grad_weights, grad_center, grad_std = gradients
        variance = inverse.square().reciprocal_()  # (M, N, D)
        slope, grad_mean, grad_variance = _moments_backward(grad_center, grad_std, std, weights, mean, variance)
        grad_log_std = grad_variance.mul_(variance).mul_(2)
        if ctx.gradient == "none":
            return None, grad_mean.to(mean.dtype), grad_log_std.to(mean.dtype), None, None, None, None
        slope += grad_weights
        # Weights outside the top k stay 0: the softmax over the others has the same formula.
        slope -= (slope * weights).sum(dim=-1, keepdim=True)
        slope = slope.mul_(weights).div_(-ctx.temperature)  # (B, M, N), of S²
        first, second = _distances_backward(slope, query, mean)  # (M, N, D)
        precision = inverse.square().mul_(-2)  # (M, N, D), -2/σ²
        grad_mean = grad_mean.addcmul_(precision, first).to(mean.dtype)
        if ctx.gradient == "full":
            grad_log_std.addcmul_(precision, second)
            if ctx.density:
                grad_log_std += 2 * slope.sum(dim=0)[..., None]
        return None, grad_mean, grad_log_std.to(mean.dtype), None, None, None, None


def drift(mean: Tensor, log_std: Tensor, cached_mean: Tensor, cached_log_std: Tensor) -> Tensor:
    """Return the sum of KL(cached || current) over diagonal Gaussians (Eq. 14), all (..., D).

    Gradients reach mean and log_std. Equals :func:`probprompt.equations.gaussian_kl`, with a custom backward pass.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> drift(zero, zero, one, zero), drift(zero, one, zero, zero)
    (tensor(0.5000), tensor(0.5677))
    """
    result: Tensor = _Drift.apply(mean, log_std, cached_mean, cached_log_std)  # type: ignore[no-untyped-call]
    return result


class _Drift(torch.autograd.Function):
    """The divergence with its backward pass."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, cached_mean: Tensor, cached_log_std: Tensor) -> Tensor:
        """Sum the divergences, and store unscaled gradients."""
        ratio = 2 * (cached_log_std.double() - log_std.double())  # (..., D)
        inverse = torch.exp(-log_std.double())
        shift = (mean.double() - cached_mean.double()).mul_(inverse)  # (..., D)
        growth = torch.expm1(ratio)
        square = shift.square()
        total = (growth - ratio).add_(square).sum().mul_(0.5)
        ctx.save_for_backward(shift.mul_(inverse).to(mean.dtype), growth.add_(square).neg_().to(mean.dtype))
        return total.to(mean.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Scale the gradients."""
        mean, log_std = ctx.saved_tensors
        return mean * gradients[0], log_std * gradients[0], None, None


def _softmax(scores: Tensor, top_k: int | None) -> Tensor:
    """Compute the softmax over the last dimension, or over only its largest scores."""
    if top_k is None:
        return torch.softmax(scores, dim=-1)
    largest, where = scores.topk(top_k, dim=-1)  # (B, M, top_k)
    return torch.zeros_like(scores).scatter_(-1, where, torch.softmax(largest, dim=-1))


def _distances(query: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return float64 S² (B, M, N), not expanded (see `equations.relevance`); inverse: 1/σ."""
    if usable(query.device):
        from probprompt.kernels import gaussians

        return gaussians.distances(query, mean, inverse)
    values = query.double()[:, None]  # (B, 1, D)
    origin = -mean.double() * inverse  # (M, N, D)
    columns = [
        torch.addcmul(origin[:, n], values, inverse[:, n]).square_().sum(dim=-1)  # (B, M) of (B, M, D)
        for n in range(mean.shape[1])
    ]
    return torch.stack(columns, dim=-1)


def _distances_backward(slope: Tensor, query: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_b slope (q - μ) and Σ_b slope (q - μ)² (M, N, D) for a slope (B, M, N).

    The squares are expanded around the mean query. With r the largest |q - μ| of a feature over queries and Gaussians,
    the error is about 1e-16 r² Σ|slope|, which is enough for gradients.
    """
    middle = query.double().mean(dim=0)  # (D,)
    values, means = query.double() - middle, mean.double() - middle  # (B, D), (M, N, D)
    powers = torch.cat([values, values.square()], dim=1)  # (B, 2 D)
    both = slope.flatten(1).T @ powers  # (M N, 2 D)
    first, second = (part.view_as(means) for part in both.chunk(2, dim=1))  # (M, N, D)
    whole = means * slope.sum(dim=0)[..., None]  # (M, N, D), μ Σ slope
    return first - whole, second - means * (2 * first - whole)


def _moments(weights: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (B, M, D) of mixtures with weights (B, M, N).

    Without kernels the variance is a difference around each pool's mean. With r the largest distance of a Gaussian's
    mean from its pool's, the error is about 1e-16 r², and the result at least the smallest σ² of the pool.
    """
    if usable(weights.device):
        from probprompt.kernels import gaussians

        return gaussians.moments(weights, mean, variance)
    share, middle, means = _centred(weights, mean)
    center = share @ means  # (M, B, D)
    square = share @ means.square().add_(variance)  # (M, B, D)
    square = square.addcmul_(center, center, value=-1).clamp_(min=variance.amin(dim=1, keepdim=True))
    parts = (part.transpose(0, 1).to(mean.dtype) for part in (center.add_(middle), square.sqrt_()))  # (B, M, D)
    center, std = (part.contiguous() for part in parts)
    return center, std


def _moments_backward(
    grad_center: Tensor, grad_std: Tensor, std: Tensor, weights: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 gradients of weights (B, M, N), up to one number per row, means and σ²."""
    if usable(weights.device):
        from probprompt.kernels import gaussians

        return gaussians.moments_backward(grad_center, grad_std, std, weights, mean, variance)
    share, _, means = _centred(weights, mean)
    pull = (grad_std / std).transpose(0, 1).double().mul_(0.5)  # (M, B, D), of the mixture's variance
    force = torch.addcmul(grad_center.transpose(0, 1).double(), pull, share @ means, value=-2)  # (M, B, D)
    # A term common to all Gaussians of an image is dropped: the softmax is invariant to it.
    slope = force @ means.mT + pull @ means.square().add_(variance).mT  # (M, B, N)
    grad_variance = share.mT @ pull  # (M, N, D)
    return slope.transpose(0, 1), (share.mT @ force).addcmul_(means, grad_variance, value=2), grad_variance


def _centred(weights: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights (M, B, N), pool means (M, 1, D), and means relative to them (M, N, D)."""
    means = mean.double()
    middle = means.mean(dim=1, keepdim=True)
    return weights.transpose(0, 1), middle, means - middle
