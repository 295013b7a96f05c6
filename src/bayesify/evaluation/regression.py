r"""Measures of predicted values, each a number a value: their mean is the measure.

The continuous ranked probability score is $\int (F(z) - 1[z \ge y])^2 dz$ for the predicted
distribution function F, in the unit of the target: the absolute error where F is certain. In closed
form for a Gaussian, with $z = (y - \mu) / \sigma$,

$$CRPS = \sigma (z (2 \Phi(z) - 1) + 2 \phi(z) - 1 / \sqrt\pi)$$

and for draws $E|X - y| - E|X - X'| / 2$ (Gneiting and Raftery, *Strictly Proper Scoring Rules,
Prediction, and Estimation*, 2007).
"""

import math

import torch
from torch import Tensor
from torch.distributions import Normal

from bayesify.errors import DataError
from bayesify.evaluation.checks import alike, require_numbers, share


def squared_error(mean: Tensor, target: Tensor) -> Tensor:
    """(mean - target)^2."""
    _check(target, mean=mean)
    return (mean - target).square()


def rmse(mean: Tensor, target: Tensor) -> float:
    """Root mean squared error.

    Example:
        >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 2**0.5
        True
    """
    return math.sqrt(squared_error(mean.double(), target.double()).mean().item())


def gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    """-log N(target | mean, variance).

    Raises:
        DataError: If a variance is not positive.
    """
    _check(target, mean=mean, variance=variance)
    return -_normal(mean, variance).log_prob(target)


def mixture_nll(means: Tensor, variances: Tensor, target: Tensor) -> Tensor:
    """-log of the mean density of the draws, each N(means_s, variances_s), `[S, B, ...]`.

    Raises:
        DataError: If a variance is not positive.
    """
    alike(means=means, variances=variances)
    _check(target, **{"means of a draw": means[0]})
    require_numbers("means", means)
    logs = _normal(means, variances).log_prob(target)
    return math.log(len(means)) - torch.logsumexp(logs, 0)


def interval(mean: Tensor, std: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The central interval that a Gaussian is in with probability `level`.

    Example:
        >>> low, high = interval(torch.zeros(1), torch.ones(1))
        >>> round(high.item(), 2)
        1.96
    """
    alike(mean=mean, std=std)
    central = torch.tensor(share("level", level), dtype=torch.float64)
    half = math.sqrt(2) * torch.erfinv(central).item() * std
    return mean - half, mean + half


def interval_of_draws(draws: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """The central interval with a share `level` of draws of the target `[S, B, ...]`."""
    require_numbers("draws", draws)
    tail = (1 - share("level", level)) / 2
    at = torch.tensor([tail, 1 - tail], dtype=draws.dtype, device=draws.device)
    low, high = torch.quantile(draws, at, dim=0)
    return low, high


def covered(low: Tensor, high: Tensor, target: Tensor) -> Tensor:
    """Whether a target is in its interval, borders included: the mean is the coverage."""
    _check(target, low=low, high=high)
    return (low <= target) & (target <= high)


def width(low: Tensor, high: Tensor) -> Tensor:
    """How wide an interval is."""
    alike(low=low, high=high)
    return high - low


def crps_gaussian(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
    """CRPS of N(mean, std^2), which for a std of 0 is the absolute error."""
    _check(target, mean=mean, std=std)
    if (std < 0).any():
        raise DataError("std must be 0 or more, and holds negative numbers.")
    z = (target - mean) / torch.where(std > 0, std, 1)
    normal = Normal(torch.zeros_like(z), 1)
    spread = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    return torch.where(std > 0, std * spread, (target - mean).abs())


def crps_of_draws(draws: Tensor, target: Tensor) -> Tensor:
    """CRPS of the distribution that draws of the target `[S, B, ...]` are.

    Sorting them makes the sum over all pairs one over the draws.

    Example:
        >>> crps_of_draws(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.5000])
    """
    require_numbers("draws", draws)
    _check(target, **{"one draw": draws[0]})
    size = len(draws)
    ordered = draws.sort(0).values
    rank = torch.arange(size, dtype=draws.dtype, device=draws.device)
    weight = (2 * rank + 1 - size).reshape(-1, *(1 for _ in target.shape))
    return (draws - target).abs().mean(0) - (weight * ordered).sum(0) / size**2


def _normal(mean: Tensor, variance: Tensor) -> Normal:
    require_numbers("variance", variance)
    if (variance <= 0).any():
        raise DataError(
            "variance must be above 0: a Gaussian without any has no density. Learn the noise, or "
            "use CRPS, which allows for certainty."
        )
    return Normal(mean, variance.sqrt(), validate_args=False)


def _check(target: Tensor, **others: Tensor) -> None:
    alike(target=target, **others)
    for name, values in {"target": target, **others}.items():
        require_numbers(name, values)
