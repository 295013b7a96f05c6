"""What a method is: which tensors, how a draw is made, what is trained, and how it is scored."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError
from bayesify.posterior import Posterior
from bayesify.sites import Site, Skipped

if TYPE_CHECKING:
    from bayesify.model import BayesianModel


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to make a network Bayesian: plain settings that print, compare and go into JSON.

    Args:
        noise: A factor on the standard deviation of what is random; 0 is the network itself.
        draws: How many draws a prediction averages by default, a multiple of `components`.
    """

    noise: float
    draws: int

    epochs: ClassVar[int] = 1  # passes of `fit` over the data, unless told
    validations: ClassVar[int] = 4  # how often `fit` looks at held-out data, unless told
    tempers: ClassVar[bool] = True  # whether `fit` chooses a temperature
    tempers_by_doubt: ClassVar[bool] = True  # whether `calibrate` gives it a slope
    takes_ood: ClassVar[bool] = False
    solves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check_numbers("noise")
        self.check_draws(self.draws)

    @property
    def components(self) -> int:
        """How many members or mixture components the posterior has."""
        return 1

    @property
    def shares_trunk(self) -> bool:
        """Whether all that can be random stands behind layers that draws have in common."""
        return False

    @abstractmethod
    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """The tensors of a network that can become random, and the layers that cannot.

        Args:
            network: A private copy, into which gates may be put for draws to act on.

        Raises:
            NothingToRandomiseError: If there is none.
        """

    @abstractmethod
    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """The distribution over `sites`, starting from the network's parameters and buffers."""

    # How it is trained

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer | None:  # noqa: ARG002
        """What is trained, and at which learning rate; None if nothing is trained by gradients.

        Args:
            posterior: What trains.
            examples: n, the number of training examples.
        """
        return None

    def rates(self, progress: float) -> Sequence[float]:
        """A factor on the learning rate of each of the optimizer's groups, over the fit's course.

        One factor stands for all groups. By default a cosine.
        """
        return [0.5 * (1 + math.cos(math.pi * progress))]

    @property
    def adapts_statistics(self) -> bool:
        """Whether running statistics of normalisation layers adapt as the weights change."""
        return False

    def groups(self, numbers: int) -> int | None:  # noqa: ARG002
        """How many draws a training batch gets, if each has `numbers` random numbers.

        None gives every example a draw of its own.
        """
        return None

    def rounds(self) -> int:
        """How often a training step runs the batch: once for each member, for instance."""
        return 1

    @property
    def round_weight(self) -> float:
        """How much the loss of one round counts."""
        return 1.0

    @property
    def slices(self) -> int:
        """Over how many components a training batch is split."""
        return 1

    def component(self, turn: int, count: int) -> Tensor:
        """Which component each of `count` training draws of a round is from."""
        return torch.zeros(count, dtype=torch.long) + turn % self.components

    def class_weights(self, turn: int, classes: int, seed: int) -> Tensor | None:  # noqa: ARG002
        """How much each class counts in the loss of a round; None counts all alike."""
        return None

    def example_weights(self, turn: int, count: int, seed: int) -> Tensor | None:  # noqa: ARG002
        """How much each example of a batch counts in a round; None counts all alike."""
        return None

    def penalty(self, posterior: Posterior, progress: float, examples: int) -> Tensor | None:  # noqa: ARG002
        """What is added to the mean loss of a step."""
        return None

    def noise_radius(self) -> float:
        """Largest noise, in pixel units, that turns training images into outliers."""
        return 0.0

    def noise_steps(self) -> int:
        """Most gradient steps that turn such noise against the network."""
        return 0

    def ood_loss(self, mutual_information: Tensor) -> Tensor:
        """Loss of each outlier, by the mutual information of its prediction in two draws."""
        raise NotImplementedError

    def after_step(self, posterior: Posterior, step: int, steps: int) -> None:  # noqa: B027
        """Called when `step` of `steps` is done, to collect what a method collects."""

    def solve(self, model: "BayesianModel", data: Iterable[Any], held: Iterable[Any]) -> None:
        """Computes what is not trained; called when training is over, if `solves`.

        Args:
            model: What is being fitted.
            data: Training batches of inputs and target.
            held: Batches of inputs and target that training did not see.
        """
        raise NotImplementedError

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

    def check_numbers(self, *names: str, least: float = 0.0) -> None:
        """Raises if one of these settings is not a finite number, `least` or more."""
        for name in names:
            value = getattr(self, name)
            if not (_is_number(value) and value >= least):
                raise SettingError(f"{name}={value!r} must be a finite number, {least:g} or more.")

    def check_count(self, name: str, least: int = 1) -> None:
        """Raises if this setting is not a whole number, `least` or more."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingError(f"{name}={value!r} must be a whole number, {least} or more.")

    def check_pair(self, name: str) -> tuple[float, float]:
        """Makes a tuple of this setting, which JSON has as a list, and returns it.

        Raises:
            SettingError: If it is not two finite numbers.
        """
        value = getattr(self, name)
        pair = tuple(value) if isinstance(value, Sequence) else ()
        if len(pair) != 2 or not all(map(_is_number, pair)):
            raise SettingError(f"{name}={value!r} must be two finite numbers.")
        object.__setattr__(self, name, pair)
        return pair[0], pair[1]

    def check_log_std(self, name: str) -> None:
        """Raises if this setting is not a range of numbers whose exponential is one."""
        low, high = self.check_pair(name)
        if not -80 <= low <= high <= 10:
            raise SettingError(
                f"{name}={(low, high)} must be two numbers, the smaller first, from -80 to 10: "
                f"beyond that a standard deviation, their exponential, overflows in training."
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings, for JSON."""
        return dataclasses.asdict(self)


def nesterov(parameters: Iterable[Any], **settings: Any) -> torch.optim.SGD:
    """SGD with momentum, as most of the papers train.

    Args:
        parameters: Tensors, or groups of them with settings of their own.
        settings: More of torch's.
    """
    return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, fused=True, **settings)


def weights_rate(weights: Iterable[Tensor]) -> float:
    """A peak rate of Adam for the weights of a trained network: 0.25 % of their root mean square.

    Adam moves every weight about as far, whatever its gradient, so that one rate for all networks
    takes those of small weights, as deep ones have, much further from where they were.

    Args:
        weights: All that train; those with two dimensions and more count.
    """
    weights = [weight.detach() for weight in weights]
    matrices = [weight for weight in weights if weight.ndim > 1] or weights
    squares = sum(matrix.norm().item() ** 2 for matrix in matrices)
    rate = 0.0025 * math.sqrt(squares / sum(matrix.numel() for matrix in matrices))
    return rate or 1e-4  # of weights that are all zero, such as biases alone, nothing can be told


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
