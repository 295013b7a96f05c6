r"""What training sees: the loss between members, and the noise of its gradient.

Members that have found solutions of their own are divided by a barrier: along the straight line
$\theta(t) = (1 - t) \theta_a + t \theta_b$ the loss rises above what it is at both ends. Where it
does not, they are in one basin (Garipov et al., NeurIPS 2018, https://arxiv.org/abs/1802.10026;
Frankle et al., ICML 2020, https://arxiv.org/abs/1912.05671).

The variance of the training gradient, over the random numbers of a method, decides how small its
steps have to be; the ABNN paper's table 4 compares it between methods.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import labelled
from bayesify.errors import SettingError
from bayesify.evaluation.checks import count
from bayesify.gradients import Gradients
from bayesify.outliers import Normalisation, Outliers
from bayesify.posterior import Draws, key

if TYPE_CHECKING:
    from bayesify.model import BayesianModel


@dataclass(frozen=True)
class Line:
    """The loss along the straight line between two members.

    Args:
        at: t, `[P]`: 0 is the first member, 1 the second.
        loss: Mean loss there, `[P]`.
    """

    at: Tensor
    loss: Tensor

    @property
    def barrier(self) -> float:
        """How far the loss rises above the line between its ends, 0 if it nowhere does."""
        ends = torch.lerp(self.loss[0], self.loss[-1], self.at)
        return (self.loss - ends).max().item()


def loss_along_line(
    model: "BayesianModel",
    loader: Iterable[Any],
    *,
    first: int = 0,
    second: int = 1,
    points: int = 11,
) -> Line:
    """Mean loss of the networks between two members' means.

    Args:
        model: A network with several members or components.
        loader: Inputs and targets.
        first: The member at the beginning.
        second: The member at the end.
        points: How many networks, both ends among them.

    Raises:
        SettingError: If there are no two such members.
    """
    members = model.posterior.components
    if not (0 <= first < members and 0 <= second < members and first != second):
        raise SettingError(
            f"first={first} and second={second} must be two different members of {members}, "
            f"numbered from 0."
        )
    at = torch.linspace(0, 1, count("points", points, 2), dtype=torch.float64)
    total, examples = torch.zeros_like(at), 0
    with torch.no_grad():
        ends = _means(model, [first, second])
        between = [{n: torch.lerp(v[0], v[1], t.item()) for n, v in ends.items()} for t in at]
        for inputs, target in labelled(loader):
            examples += len(inputs)
            for number, draw in enumerate(between):
                output = model.runner.plain(draw, inputs.to(model.device))
                wanted = model.likelihood.target(target, output)
                statistics = model.likelihood.statistics(output.unsqueeze(0))
                alone = model.pool({name: value[0] for name, value in statistics.items()})
                total[number] += model.likelihood.nll(alone, wanted).double().sum().cpu()
    return Line(at, total / examples)


def _means(model: "BayesianModel", members: list[int]) -> Draws:
    """The members' tensors without any noise, stacked."""
    shapes = model.posterior.shapes().items()
    still = {n: torch.zeros(len(members), *shape, device=model.device) for n, shape in shapes}
    draws: Draws = model.posterior(torch.tensor(members, device=model.device), still)
    return draws


@dataclass(frozen=True)
class GradientNoise:
    """How much a training gradient varies from run to run.

    Args:
        variance: Mean squared deviation of a parameter's gradient from its mean over the runs.
        signal: Mean square of these means.
        parameters: How many parameters train.
        runs: How many runs.
    """

    variance: float
    signal: float
    parameters: int
    runs: int


def gradient_noise(
    model: "BayesianModel",
    batch: Any,
    *,
    runs: int = 30,
    subset: int | None = None,
    groups: int | None = None,
    normalisation: Normalisation | None = None,
    seed: int = 0,
) -> GradientNoise:
    """Variance of a method's training gradient over its random numbers, on one batch.

    The gradients are those of `fit`, of a copy of the model: with the method's own draws, rounds
    and penalty.

    Args:
        model: What would be trained.
        batch: Inputs and target.
        runs: How many gradients.
        subset: Examples of the batch that each run sees, chosen anew, which adds the noise of
            mini-batches that a network without random numbers has too; all by default.
        groups: Draws a batch; see `fit`.
        normalisation: Of the images, for methods that add noise in pixel units; see `fit`.
        seed: Of the runs.

    Raises:
        SettingError: If the method trains nothing by gradients.
    """
    count("runs", runs, 2)
    ((inputs, target),) = labelled([batch])
    twin = copy.deepcopy(model)
    if twin.method.optimizer(twin.posterior, len(inputs)) is None:
        raise SettingError(
            f"{type(twin.method).__name__} trains nothing by gradients, so that there is no "
            f"gradient that could vary."
        )
    outliers = None
    if radius := twin.method.noise_radius():
        outliers = Outliers(radius, None, normalisation, twin.method.noise_steps())
    gradients = Gradients(twin, outliers, groups, None, seed)
    mean = spread = torch.zeros(())
    for run in range(runs):
        rows = _rows(len(inputs), subset, key("rows", seed, run))
        some = inputs.map_batched(itemgetter(rows))
        gradient = gradients.vector(some, torch.as_tensor(target)[rows], key("run", seed, run))
        # Welford's sums: no gradient is kept, and nothing large cancels.
        off = gradient - mean
        mean = mean + off / (run + 1)
        spread = spread + off * (gradient - mean)
    return GradientNoise(
        (spread / (runs - 1)).mean().item(), mean.square().mean().item(), mean.numel(), runs
    )


def _rows(size: int, subset: int | None, seed: int) -> Tensor:
    if subset is None:
        return torch.arange(size)
    if count("subset", subset) > size:
        raise SettingError(f"subset={subset} is more than the {size} examples of the batch.")
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:subset]
