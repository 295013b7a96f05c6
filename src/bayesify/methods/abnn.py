r"""ABNN: the scales of a trained network's normalisation layers, made random.

Franchi et al., *Make Me a BNN: A Simple Strategy for Estimating Bayesian Uncertainty from
Pre-trained Models*, CVPR 2024 (https://arxiv.org/abs/2312.15297).

A normalisation layer gets Gaussian noise on its scale, one number a channel:

$$BNL(h) = \gamma (1 + \alpha \epsilon) (h - \mu) / \sigma + \beta, \quad \epsilon \sim N(0, 1)$$

M members start from one checkpoint. Only $\gamma$ and $\beta$ train, by

$$-\frac{1}{n} \sum_i (1 + \eta_{m, y_i}) \log p(y_i | x_i, \gamma_m, \beta_m, \epsilon_i)
+ \frac{\lambda}{2} ||\gamma_m, \beta_m||^2$$

with a fresh $\epsilon$ for every example. $\eta$ is drawn once a member: it favours
$\lfloor \sqrt C \rfloor$ classes, so that members come to differ. A prediction is the mean
probability over all members' draws. The layers' statistics stay as they are in the checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.methods.method import Method, nesterov
from bayesify.posterior import Members, Posterior, key
from bayesify.sites import Site, Skipped, find_norms, require_sites


@dataclass(frozen=True, kw_only=True)
class ABNN(Method):
    """Random scales in all normalisation layers, or in those that `where` names.

    Args:
        members: M, how many sets of scales and shifts are trained from the checkpoint.
        noise: alpha, the relative standard deviation of a scale.
        draws: Draws of a prediction, over all members.
        favoured_weight: 1 + eta of a member's favoured classes; 1 favours none.
        lr: Peak learning rate of scales and shifts (SGD, Nesterov momentum 0.9).
        weight_decay: lambda, the prior on scales and shifts.

    Example:
        >>> ABNN(members=4, draws=16).components
        4
    """

    members: int = 3
    noise: float = 0.1
    draws: int = 24
    favoured_weight: float = 3.0
    lr: float = 3e-3
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        self.check_count("members")
        self.check_numbers("favoured_weight", "lr", "weight_decay")
        super().__post_init__()

    @property
    def components(self) -> int:
        """The members."""
        return self.members

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Every normalisation layer with a learnable scale."""
        sites, skipped = find_norms(network)
        require_sites(sites, skipped, "ABNN")
        return sites, skipped

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """gamma_m (1 + alpha eps) and beta_m, all members at the checkpoint's values."""
        return Members(sites, tensors, self.members, self.noise)

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer:  # noqa: ARG002
        """Scales and shifts alike; weight decay is the Gaussian prior."""
        return nesterov(posterior.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def rounds(self) -> int:
        """Every member sees every batch."""
        return self.members

    def class_weights(self, turn: int, classes: int, seed: int) -> Tensor | None:
        """1 + eta of a member: `favoured_weight` for its favoured classes, 1 for the others."""
        generator = torch.Generator().manual_seed(key("favoured", seed, turn))
        favoured = torch.randperm(classes, generator=generator)[: math.isqrt(classes)]
        return torch.ones(classes).index_fill(0, favoured, self.favoured_weight)
