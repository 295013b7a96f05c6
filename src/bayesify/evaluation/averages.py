"""What measures that take data batch by batch have in common, and those that are averages."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from bayesify.errors import DataError, SettingError
from bayesify.evaluation import classification, diversity, regression
from bayesify.evaluation.checks import numbers


class Measure(Metric):  # type: ignore[misc]
    """What all have in common."""

    full_state_update = False
    is_differentiable = False

    def keep_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Adds a state that is summed over batches and processes."""
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def keep_all(self, name: str) -> None:
        """Adds a state that grows with the number of examples."""
        self.add_state(name, [], dist_reduce_fx="cat")


class Average(Measure):
    """The mean of a number an example.

    Args:
        of: A function of a batch that gives these numbers, `[B, ...]`; a subclass has its own.

    Example:
        >>> mean = Average(lambda x: x)
        >>> mean.update(torch.tensor([1.0, 3.0]))
        >>> mean.compute()
        tensor(2., dtype=torch.float64)
    """

    of: Callable[..., Tensor]
    total: Tensor
    examples: Tensor

    def __init__(self, of: Callable[..., Tensor] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if of is not None:
            self.of = of
        elif not hasattr(self, "of"):
            raise SettingError("Average needs a function of a batch: Average(of=...).")
        self.keep_sum("total")
        self.keep_sum("examples")

    def update(self, *batch: Tensor) -> None:
        """Adds a batch, in the arguments of the function."""
        values = numbers(type(self).__name__, self.of(*batch))
        self.total += values.sum().to(self.total.device)
        self.examples += values.numel()

    def compute(self) -> Tensor:
        """The mean.

        Raises:
            DataError: If there was no batch.
        """
        require_some(self.examples)
        return self.total / self.examples


class Accuracy(Average):
    """Share of right answers; `update(probs, target)`."""

    of = staticmethod(classification.correct)


class NLL(Average):
    """Mean -log of the target's probability; `update(probs, target)`."""

    of = staticmethod(classification.nll)


class Brier(Average):
    """Mean Brier score; `update(probs, target)`."""

    of = staticmethod(classification.brier)


class SoftLabelKL(Average):
    """Mean KL from people's label distributions; `update(probs, people)`."""

    of = staticmethod(classification.soft_label_kl)


class Disagreement(Average):
    """Mean share of pairs of draws with different answers; `update(draws)`."""

    of = staticmethod(diversity.disagreement)


class MutualKL(Average):
    """Mean KL divergence between two draws; `update(draws)`."""

    of = staticmethod(diversity.mutual_kl)


class RMSE(Average):
    """Root mean squared error; `update(mean, target)`."""

    of = staticmethod(regression.squared_error)

    def compute(self) -> Tensor:
        """The root of the mean."""
        return super().compute().sqrt()


class GaussianNLL(Average):
    """Mean -log N(target | mean, variance); `update(mean, variance, target)`."""

    of = staticmethod(regression.gaussian_nll)


class MixtureNLL(Average):
    """Mean -log of the draws' mean density; `update(means, variances, target)`."""

    of = staticmethod(regression.mixture_nll)


class IntervalCoverage(Average):
    """Share of targets in their intervals; `update(low, high, target)`."""

    of = staticmethod(regression.covered)


class IntervalWidth(Average):
    """Mean width of intervals; `update(low, high)`."""

    of = staticmethod(regression.width)


class GaussianCRPS(Average):
    """Mean CRPS of N(mean, std^2); `update(mean, std, target)`."""

    of = staticmethod(regression.crps_gaussian)


class DrawsCRPS(Average):
    """Mean CRPS of draws; `update(draws, target)`."""

    of = staticmethod(regression.crps_of_draws)


def require_some(examples: Tensor) -> None:
    """Raises if nothing was added."""
    if not examples:
        raise DataError("there is nothing to measure: no batch was added. Call update() first.")


def tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    """Numbers as torchmetrics gives them."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
