r"""SWAG: a Gaussian around the path that stochastic gradient descent takes from the checkpoint.

Maddox et al., *A Simple Baseline for Bayesian Uncertainty in Deep Learning*, NeurIPS 2019
(https://arxiv.org/abs/1902.02476).

All weights train on by SGD at a constant rate. From some point on, snapshots $\theta_i$ of them are
collected: their mean, the variance of each weight, and how far each of the last K snapshots was
from the mean so far, $D = (\theta_i - \bar\theta_i)$. A draw is

$$\theta = \bar\theta + noise \left( \frac{1}{\sqrt 2} \Sigma_{diag}^{1/2} \epsilon_1
+ \frac{1}{\sqrt{2 (K - 1)}} D \epsilon_2 \right), \qquad \epsilon \sim N(0, I)$$

with one $\epsilon_1$ a weight and one $\epsilon_2$ a snapshot, the same for all layers. The paper
estimates the statistics of batch norm anew for each draw; here they stay those of the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError
from bayesify.methods.method import Method, nesterov
from bayesify.posterior import Draws, NamedTensors, Posterior
from bayesify.sites import Site, Skipped, find_parameters

# The name of epsilon_2 among those of weights, none of which starts with a dot.
COEFFICIENTS = ".coefficients"


@dataclass(frozen=True, kw_only=True)
class SWAG(Method):
    """A Gaussian of low rank plus diagonal over all weights, from snapshots of SGD.

    Args:
        rank: K, how many of the last snapshots the covariance between weights is made of.
        noise: A factor on the standard deviation; 0 is the mean of the snapshots.
        draws: Draws of a prediction.
        lr: Learning rate, constant (SGD, Nesterov momentum 0.9).
        weight_decay: Of all weights.
        collect_from: Which part of the fit is over when collecting begins.
        snapshots: How many are collected, evenly spaced; every step's if there are no more steps.
    """

    rank: int = 10
    noise: float = 1.0
    draws: int = 20
    lr: float = 1e-3  # statistics do not follow the weights: on ResNet-20, 3e-3 diverged
    weight_decay: float = 5e-4
    collect_from: float = 0.5
    snapshots: int = 40

    def __post_init__(self) -> None:
        self.check_count("snapshots")
        self.check_count("rank")
        self.check_numbers("lr", "weight_decay", "collect_from")
        if self.rank < 2:
            raise SettingError("rank=1 must be 2 or more: one deviation spans no covariance.")
        if self.collect_from >= 1:
            raise SettingError(
                f"collect_from={self.collect_from!r} must be less than 1, the end of the fit."
            )
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Every weight and bias."""
        return find_parameters(network)

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """Certainty at the network's values, until snapshots are collected."""
        weights = {site.name: tensors[site.name] for site in sites}
        return Trajectory(weights, self.rank, self.noise)

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer:  # noqa: ARG002
        """The weights that move; what is collected of them is not trained."""
        return nesterov(posterior.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def rates(self, progress: float) -> Sequence[float]:  # noqa: ARG002
        """Constant, so that the weights keep moving."""
        return [1.0]

    def groups(self, numbers: int) -> int:  # noqa: ARG002
        """A batch runs whole: nothing is random in training."""
        return 1

    def after_step(self, posterior: Posterior, step: int, steps: int) -> None:
        """Collects a snapshot whenever one is due; the first of a fit starts anew."""
        assert isinstance(posterior, Trajectory)  # noqa: S101  (made above)
        start = int(self.collect_from * steps)
        before = max(0, step - 1 - start) * self.snapshots // (steps - start)
        due = max(0, step - start) * self.snapshots // (steps - start)
        if due > before:
            posterior.collect(anew=before == 0)


class Point(Posterior):
    """One value, certain and trainable.

    Args:
        weights: Where it starts.
    """

    components = 1
    noise = 0.0

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = NamedTensors(weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """The same for all."""
        return {
            name: value.expand(len(component), *value.shape) for name, value in self.weights.items()
        }


class Trajectory(Posterior):
    """A Gaussian of the places where a point has been.

    The point moves in training; draws know only what was collected of it, at first nothing, so
    that they are the weights it starts from. The second moment is kept around the mean, since the
    difference of two large moments would lose a variance that is far smaller than the weights.

    Args:
        weights: Where the point starts.
        rank: How many deviations are kept.
        noise: A factor on the standard deviation.
    """

    components = 1

    def __init__(self, weights: Mapping[str, Tensor], rank: int, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.rank = rank
        self.point = Point(weights)
        self.mean = NamedTensors(weights, trainable=False)
        self.variance = NamedTensors(
            {name: torch.zeros_like(value) for name, value in weights.items()}, trainable=False
        )
        self.deviations = NamedTensors(
            {name: value.new_zeros(rank, *value.shape) for name, value in weights.items()},
            trainable=False,
        )
        self.counts = NamedTensors(
            {"collected": torch.zeros((), dtype=torch.long)}, trainable=False
        )

    def in_training(self) -> Posterior:
        """The point itself."""
        return self.point

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number a weight, and one a deviation."""
        own = {name: tuple(value.shape) for name, value in self.mean.items()}
        return {**own, COEFFICIENTS: (self.rank,)}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """Draws around the mean."""
        columns = self.counts["collected"].clamp(2, self.rank)
        coefficients = noise[COEFFICIENTS] / (2.0 * (columns - 1)).sqrt()
        draws = {}
        for name, mean in self.mean.items():
            alone = (self.variance[name] / 2).sqrt() * noise[name].to(mean.dtype)
            together = torch.tensordot(coefficients.to(mean.dtype), self.deviations[name], dims=1)
            draws[name] = mean + self.noise * (alone + together)
        return draws

    @torch.no_grad()
    def collect(self, *, anew: bool = False) -> None:
        """Takes a snapshot of the point.

        Args:
            anew: Forgets all earlier ones.
        """
        collected = self.counts["collected"]
        count = 1 if anew else int(collected) + 1
        collected.fill_(count)
        for name, weight in self.point.weights.items():
            mean, variance, deviations = (
                group[name] for group in (self.mean, self.variance, self.deviations)
            )
            if count == 1:
                deviations.zero_()
            before = weight - mean
            mean.lerp_(weight, 1 / count)
            after = weight - mean
            variance.lerp_(before * after, 1 / count)
            deviations[(count - 1) % self.rank] = after
