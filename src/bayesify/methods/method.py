"""What a method is: which tensors, how a draw is made, what is trained, and how it is scored."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError
from bayesify.posterior import Posterior
from bayesify.sites import Site, Skipped


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to make a network Bayesian: plain settings that print, compare and go into JSON.

    Args:
        noise: A factor on the standard deviation of what is random; 0 is the network itself.
        draws: How many draws a prediction averages by default, a multiple of `components`.
    """

    noise: float
    draws: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise SettingError(f"noise={self.noise!r} must be a finite number, 0 or more.")
        self.check_draws(self.draws)

    @property
    def components(self) -> int:
        """How many members or mixture components the posterior has."""
        return 1

    @abstractmethod
    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """The tensors of a network that can become random, and the layers that cannot.

        Raises:
            NothingToRandomiseError: If there is none.
        """

    @abstractmethod
    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """The distribution over `sites`, starting from the network's tensors."""

    @abstractmethod
    def optimizer(self, posterior: Posterior) -> torch.optim.Optimizer:
        """What is trained, and at which learning rate."""

    def rounds(self) -> int:
        """How often a training step runs the batch: once for each member, for instance."""
        return 1

    def component(self, turn: int, count: int) -> Tensor:
        """Which component each of `count` training draws of a round is from."""
        return torch.zeros(count, dtype=torch.long) + turn % self.components

    def class_weights(self, turn: int, classes: int, seed: int) -> Tensor | None:  # noqa: ARG002
        """How much each class counts in the loss of a round; None counts all alike."""
        return None

    def check_draws(self, draws: int) -> int:
        """Returns `draws` if that number can be drawn.

        Raises:
            SettingError: If it is not a positive multiple of the number of components.
        """
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise SettingError(f"draws={draws!r} must be a whole number, 1 or more.")
        if draws % self.components:
            nearest = max(1, round(draws / self.components)) * self.components
            raise SettingError(
                f"draws={draws} is not a multiple of the {self.components} members, and every "
                f"member must have as many draws as the others. Use draws={nearest}, for instance."
            )
        return draws

    def to_dict(self) -> dict[str, Any]:
        """The settings, for JSON."""
        return dataclasses.asdict(self)
