"""Equations 2 to 14 of the paper as pure functions.

Shapes: B images, M prompt tokens, each with a pool of N Gaussians, K samples, D features. A Gaussian is given by its
mean μ and by log σ, the logarithm of its standard deviations (the covariance is diagonal).

Every function returns the widest dtype of its inputs. Sums run in float64, unaffected by autocast and TF32, because
squared distances reach 1e5 while differences of 1 decide.
"""

import torch
from torch import Tensor

__all__ = ["aggregate", "average", "gaussian_kl", "mixture_moments", "relevance", "sample_prompts", "top_k"]

_SMALLEST_NORM = 1e-8  # a shorter vector counts as zero: its cosine with anything is about 0, not NaN


def relevance(query: Tensor, mean: Tensor, log_std: Tensor, temperature: float = 1.0, density: bool = False) -> Tensor:
    """Return the relevance of each Gaussian of a pool to each query (Eqs. 2 and 3).

        S²(n) = Σ_d (q_d - μ_d(n))² / σ_d(n)²
        s(n)  = exp(-S²(n) / temperature) / Σ_j exp(-S²(j) / temperature)

    query (B, D), mean and log_std (M, N, D) -> (B, M, N), each row over N summing to 1. A temperature of 1 is the
    paper's formula; √D or D soften the choice. With ``density`` the log-determinant 2 Σ_d log σ_d(n) is added to S²(n):
    at a temperature of 2 that is Bayes' rule for Gaussians of equal weight.

    >>> mean = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]])  # one pool of two Gaussians
    >>> query = torch.tensor([[1.0, 0.0], [0.5, 0.0]])  # half-way, and nearer to the first
    >>> relevance(query, mean, torch.zeros(1, 2, 2))
    tensor([[[0.5000, 0.5000]],
    <BLANKLINE>
            [[0.8808, 0.1192]]])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    # With T = Σ (|q| + |μ|)²/σ² up to 1e13, expanding the square into matmuls has an error of 1e-16 T: weights of a
    # query within σ of two means would be off by 1e-3. This form has 1e-16 S √T, and its gradient keeps one large
    # tensor, not two.
    inverse = torch.exp(-log_std.double())  # (M, N, D), 1/σ
    origin = -mean.double() * inverse  # (M, N, D)
    whitened = torch.addcmul(origin, query.double()[:, None, None, :], inverse)  # (B, M, N, D)
    distance = whitened.square().sum(dim=-1)  # (B, M, N), S²
    if density:
        distance = distance + 2 * log_std.double().sum(dim=-1)
    return torch.softmax(-distance / temperature, dim=-1).to(_widest(query, mean, log_std))  # (B, M, N)


def whitening(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (D,) and matrix (D, D) that whiten queries (n, D) approximately.

    The covariance is shrunk towards a multiple of I by oracle approximating shrinkage (Chen et al., 2010), so few
    queries suffice.

    >>> mean, matrix = whitening(torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 1.0], [2.0, -1.0]]))
    >>> mean.tolist(), round(float((matrix @ matrix)[0, 0]), 6)  # the variance is 1/2
    ([2.0, 0.0], 2.0)
    """
    from sklearn.covariance import oas  # few runs need it

    wide = queries.double()
    values, vectors = torch.linalg.eigh(torch.from_numpy(oas(wide.cpu().numpy())[0]).to(wide))
    return wide.mean(dim=0), vectors / values.clamp_min(_SMALLEST_NORM).sqrt() @ vectors.T


def top_k(weights: Tensor, k: int) -> Tensor:
    """Keep the k largest weights along the last dimension, renormalized; the others become 0.

    weights (..., N) -> (..., N).

    >>> top_k(torch.tensor([0.1, 0.6, 0.3]), 2)
    tensor([0.0000, 0.6667, 0.3333])
    """
    if not 1 <= k <= weights.shape[-1]:
        raise ValueError(f"k must be between 1 and {weights.shape[-1]}, the number of weights, got {k}.")
    largest, where = weights.double().topk(k, dim=-1)  # (..., k)
    share = largest / largest.sum(dim=-1, keepdim=True)  # (..., k)
    return torch.zeros_like(weights).scatter(-1, where, share.to(weights.dtype))  # (..., N)


def mixture_moments(weights: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Match one Gaussian to each mixture: mean and standard deviation (Eqs. 5 to 7).

        μ_GM  = Σ_n s(n) μ(n)
        σ_GM² = Σ_n s(n) (σ(n)² + (μ(n) - μ_GM)²)

    weights (B, M, N), each row over N summing to 1, mean and log_std (M, N, D) -> (B, M, D) and (B, M, D).

    >>> mean = torch.tensor([[[-1.0], [1.0]]])
    >>> center, std = mixture_moments(torch.tensor([[[0.5, 0.5]]]), mean, torch.zeros(1, 2, 1))
    >>> center.item(), round(std.item(), 4)  # a variance of 1 within the two, and of 1 between them
    (0.0, 1.4142)
    """
    means, variances = mean.double(), torch.exp(2 * log_std.double())  # (M, N, D)
    share = weights.double()[..., None]  # (B, M, N, 1)
    # Contiguous, because all samples inherit the layout, and `aggregate` would copy them to change it.
    center = torch.einsum("bmn,mnd->bmd", share.squeeze(-1), means).contiguous()  # (B, M, D)
    # Squares around the mean are never negative, unlike Σ s μ² - μ_GM²: neither the root nor its gradient can fail.
    deviation = means - center[:, :, None, :]  # (B, M, N, D)
    variance = (share * (variances + deviation.square())).sum(dim=2)  # (B, M, D)
    dtype = _widest(weights, mean, log_std)
    return center.to(dtype), variance.sqrt().to(dtype)


def sample_prompts(
    mean: Tensor,
    std: Tensor,
    count: int,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Draw `count` samples of each mixture, differentiable in its moments (Eq. 8).

        P_k = μ_GM + σ_GM ⊙ ε_k,  ε_k ~ N(0, I)

    mean and std (B, M, D) -> (B, M, K, D) with K = count. ε is `noise` if given, of any shape that broadcasts: (M, K,
    D) is shared by all images. Otherwise it is drawn from `generator` on the device of `mean`, or from the global one.

    >>> noise = torch.tensor([[[-1.0], [0.0], [2.0]]])  # (M, K, D) = (1, 3, 1)
    >>> sample_prompts(torch.tensor([[[10.0]]]), torch.tensor([[[0.5]]]), 3, noise=noise).flatten()
    tensor([ 9.5000, 10.0000, 11.0000])
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    images, tokens, features = mean.shape
    shape = (images, tokens, count, features)
    if noise is None:
        noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)  # (B, M, K, D)
    dtype = _widest(mean, std, noise)
    wide = torch.promote_types(dtype, torch.float32)
    center, scale = mean.to(wide)[:, :, None, :], std.to(wide)[:, :, None, :]  # (B, M, 1, D)
    return torch.addcmul(center, scale, noise.to(wide).expand(shape)).to(dtype)  # (B, M, K, D)


def aggregate(samples: Tensor, query: Tensor, temperature: float = 1.0) -> Tensor:
    """Aggregate each token's samples, weighted by their cosine with the query (Eqs. 9, 10).

        w_k = exp(cos(P_k, q) / temperature) / Σ_j exp(cos(P_j, q) / temperature)
        P   = Σ_k w_k P_k

    samples (B, M, K, D), query (B, D) -> (B, M, D). The paper's formula has no temperature.

    >>> samples = torch.tensor([[[[3.0, 0.0], [0.0, 1.0]]]])  # their cosines with the query are 1 and 0
    >>> aggregate(samples, torch.tensor([[2.0, 0.0]]))
    tensor([[[2.1932, 0.2689]]])
    """
    wide = samples.double()  # (B, M, K, D)
    direction = _unit(query.double())  # (B, D)
    length = torch.linalg.vector_norm(wide, dim=-1).clamp_min(_SMALLEST_NORM)  # (B, M, K)
    product = wide.flatten(1, 2) @ direction[..., None]  # (B, M * K, 1)
    cosine = product.view_as(length) / length  # (B, M, K)
    weights = torch.softmax(cosine / temperature, dim=-1)  # (B, M, K)
    prompt = (weights[..., None, :] @ wide).squeeze(-2)  # (B, M, D)
    return prompt.to(_widest(samples, query))


def sampled_prompt(mean: Tensor, std: Tensor, query: Tensor, noise: Tensor, temperature: float = 1.0) -> Tensor:
    """Sample and aggregate prompts without forming the samples (Eqs. 8-10).

    Equals ``aggregate(sample_prompts(mean, std, noise=noise), query)``. The weights sum to one, so P = μ + σ Σ_k w_k
    ε_k, and a sample's cosine needs only inner products:

        <P_k, q>  = <μ, q> + <σ q, ε_k>
        |P_k|²    = |μ|² + 2 <μ σ, ε_k> + <σ², ε_k²>

    mean and std (B, M, D), query (B, D) or one per token (B, M, D), noise (M, K, D) shared by the batch or (B, M, K, D)
    -> (B, M, D).

    >>> mean, std, query = torch.ones(1, 1, 2), torch.full((1, 1, 2), 0.5), torch.tensor([[1.0, 0.0]])
    >>> noise = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> sampled_prompt(mean, std, query, noise)
    tensor([[[1.2844, 1.2156]]])
    >>> aggregate(sample_prompts(mean, std, 2, noise=noise), query)
    tensor([[[1.2844, 1.2156]]])
    """
    dtype = _widest(mean, std, query)
    wide = torch.promote_types(dtype, torch.float32)
    mean, std, query, noise = mean.to(wide), std.to(wide), query.to(wide), noise.to(wide)
    query = query if query.ndim == 3 else query[:, None]  # (B, 1 or M, D)
    along = (mean * query).sum(-1, keepdim=True) + _against(std * query, noise)  # (B, M, K)
    square = (mean * mean).sum(-1, keepdim=True) + 2 * _against(mean * std, noise)  # (B, M, K)
    square = square + _against(std * std, noise * noise)  # (B, M, K)
    length = square.clamp_min(_SMALLEST_NORM**2).sqrt() * torch.linalg.vector_norm(query, dim=-1, keepdim=True)
    cosine = along / length.clamp_min(_SMALLEST_NORM)  # (B, M, K)
    weights = torch.softmax(cosine / temperature, dim=-1)  # (B, M, K)
    mixed = torch.einsum("bmk,mkd->bmd" if noise.ndim == 3 else "bmk,bmkd->bmd", weights, noise)  # (B, M, D)
    return torch.addcmul(mean, std, mixed).to(dtype)


def _against(vector: Tensor, noise: Tensor) -> Tensor:
    """Return products (B, M, K) of vectors (B, M, D) with noise (M, K, D) or (B, M, K, D)."""
    return torch.einsum("bmd,mkd->bmk" if noise.ndim == 3 else "bmd,bmkd->bmk", vector, noise)


def average(samples: Tensor) -> Tensor:
    """Average each token's samples: `aggregate` with w_k = 1/K.

    samples (B, M, K, D) -> (B, M, D).

    >>> average(torch.tensor([[[[3.0, 0.0], [0.0, 1.0]]]]))
    tensor([[[1.5000, 0.5000]]])
    """
    return samples.mean(dim=-2, dtype=torch.float64).to(samples.dtype)  # (B, M, D)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """Return KL(p || q) of diagonal Gaussians; in Eq. 14, p is the cached one.

        KL = 1/2 Σ_d [ exp(2r_d) - 1 - 2r_d + (μp_d - μq_d)² / σq_d² ],  r = log σp - log σq

    All four (..., D) -> (...).

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> gaussian_kl(zero, zero, zero, zero), gaussian_kl(one, zero, zero, zero)
    (tensor(0.), tensor(0.5000))
    >>> gaussian_kl(zero, zero, zero, one), gaussian_kl(zero, one, zero, zero)  # it has a direction
    (tensor(0.5677), tensor(2.1945))
    """
    ratio = log_std_p.double() - log_std_q.double()  # (..., D)
    # About 2r² for small r: in float64 twelve digits are left at r = 1e-4, and the gradient at r = 0 is exactly 0.
    spread = torch.expm1(2 * ratio) - 2 * ratio  # (..., D)
    shift = (mean_p.double() - mean_q.double()) * torch.exp(-log_std_q.double())  # (..., D)
    divergence = 0.5 * (spread + shift.square()).sum(dim=-1)  # (...)
    return divergence.to(_widest(mean_p, log_std_p, mean_q, log_std_q))


def _unit(vector: Tensor) -> Tensor:
    """Scale to length 1; a zero vector stays zero."""
    length: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)  # (..., 1)
    return vector / length.clamp_min(_SMALLEST_NORM)


def _widest(first: Tensor, *others: Tensor) -> torch.dtype:
    """Return the widest dtype: float32 for a bfloat16 query and float32 parameters."""
    dtype = first.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype
