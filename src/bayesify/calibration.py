"""calibrate: chooses how strong the noise is, and how to temper, by held-out likelihood."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import Inputs
from bayesify.likelihood import Averages
from bayesify.validation import collect

if TYPE_CHECKING:
    from bayesify.likelihood import Likelihood
    from bayesify.model import BayesianModel

MOST_EXAMPLES = 3000
SEARCH_EXAMPLES = 500  # losses are compared example by example, which takes few
LARGEST_OUTPUT = 1 << 26  # numbers kept in memory at a time, over all draws
FARTHEST = 6  # steps of the walk, a factor 8 each way
NEAR = 0.25  # of a step, a factor 1.09: too little to try again
POSITIONS = 1024  # of a dense output, that count
COLDEST, HOTTEST = 0.02, 50.0
FINE = 2 ** (1 / 64)  # how exactly the highest temperature as likely as another is found
TEMPERATURE_SPREAD = 0.5  # of the prior on log T: most networks want between 0.4 and 2.7
SLOPE_SPREAD = 0.25  # of the prior on the slope: a factor of 1.8 at one nat of doubt


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose.

    Args:
        noise: The factor on the posterior's standard deviation.
        temperature: That of the average over draws, where it has no doubt.
        nll: Held-out negative log-likelihood with all of them.
        evaluations: How many strengths of noise were tried.
        slope: How the temperature rises with doubt; see `bayesify.likelihood`.
    """

    noise: float
    temperature: float
    nll: float
    evaluations: int
    slope: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A strength of noise, the temperature that goes with it, and what both come to.

    Args:
        noise: The noise.
        temperature: The best one for it.
        losses: Each example's NLL at that temperature.
        untempered: Mean NLL at the temperature that the noise is chosen by.
    """

    noise: float
    temperature: float
    losses: Tensor
    untempered: float

    @property
    def nll(self) -> float:
        """The mean of the losses."""
        return self.losses.mean().item()


class Search:
    """Finds how much noise there should be, and then the temperature and its slope.

    All strengths of noise share their random numbers, so that NLL is a smooth function of the
    noise and a few evaluations find its minimum: a walk in steps of a factor 1.41, then a parabola
    through the lowest three. The search sees a part of the data; temperature and slope are then
    chosen by everything.

    Noise and temperature can stand in for each other. A temperature makes the network less sure
    of everything alike, noise of what it knows least: so the noise explains what it can, and the
    temperature what is left. That is the noise which is likeliest at temperature 1 (or at a lower
    one that the network itself asks for), or, if another with a temperature of its own is likelier
    by more than a standard error, that one.

    Mirrored images bring doubt of their own, which may be all that is asked for at temperature 1:
    there the noise that draws have stays, unless another is likelier by more than two standard
    errors. A walk along what is flat would end anywhere.
    """

    def __init__(
        self, model: "BayesianModel", loader: Iterable[Any], draws: int, seed: int
    ) -> None:
        self.model = model
        self.batches = collect(loader, seed, most=MOST_EXAMPLES).batches
        self.draws = draws
        self.seed = seed
        self.usual = 1.0  # the temperature that the noise is chosen by
        self.evaluations = 0

    def run(self) -> Calibration:
        """Searches; the model is left with the noise it had."""
        before = self.model.noise
        self.model.estimate_noise(self.batches)
        try:
            best = self._quiet()
            if self.model.posterior.varies():
                noisy = self._noisy(before or self.model.method.noise or 0.1, best)
                best = min(best, noisy, key=attrgetter("nll"))
            return self._tempered(best.noise)
        finally:
            self.model.noise = before

    @torch.no_grad()
    def _tempered(self, noise: float) -> Calibration:
        """Temperature and slope for this noise, by everything."""
        seen, slope = self.averages(noise), 0.0
        if self.model.method.tempers_by_doubt:
            temperature, slope, nll = best_slope(self.model.likelihood, *seen)
        else:
            temperature, nll = best_temperature(self.model.likelihood, *seen)
        return Calibration(noise, temperature, nll, self.evaluations, slope)

    def _quiet(self) -> Trial:
        """No noise, which also says at what temperature noise is tried."""
        quiet = self._try(0.0)
        self.usual = min(1.0, quiet.temperature)
        return quiet

    @torch.no_grad()
    def better_mirrored(self) -> bool:
        """Whether mirrored draws are likelier.

        They have no place where outputs would have to be moved back, and where draws are all alike.
        """
        inputs, target = self.batches[0]
        output, _ = self._outputs(inputs[:1], target[:1], self.model.method.components)
        if output.ndim > 3 or self.model.noise == 0 or not self.model.posterior.varies():
            return False
        before, nlls = self.model.mirrored, []
        try:
            for self.model.mirrored in (False, True):
                nlls.append(self._try(self.model.noise).nll)
        finally:
            self.model.mirrored = before
        return nlls[1] < nlls[0]

    def _noisy(self, start: float, quiet: Trial) -> Trial:
        """The noise that is preferred, unless another is clearly likelier."""
        walked: dict[float, Trial] = {}
        likeliest = self._walk(start, walked, attrgetter("nll"))
        if self.model.mirrored:
            preferred, errors = walked[0], 2.0
        else:
            preferred, errors = self._walk(start, walked, attrgetter("untempered")), 1.0
        good = as_likely(preferred.losses, likeliest.losses, errors) and preferred.nll < quiet.nll
        return preferred if good else likeliest

    def _walk(
        self, start: float, trials: dict[float, Trial], measure: Callable[[Trial], float]
    ) -> Trial:
        """The noise where a measure is lowest, near `start`; adds what it tries to `trials`."""

        def tried(position: float) -> Trial:
            if position not in trials:
                trials[position] = self._try(start * 2 ** (position / 2))
            return trials[position]

        def value(position: int) -> float:
            return measure(tried(position))

        lowest = 0
        for direction in (1, -1):
            while abs(lowest) < FARTHEST and value(lowest + direction) < value(lowest):
                lowest += direction
            if lowest:
                break  # better in this direction: no need to look in the other
        if abs(lowest) == FARTHEST:
            return trials[lowest]
        left, middle, right = (value(lowest + step) for step in (-1, 0, 1))
        vertex = 0.5 * (left - right) / max(left - 2 * middle + right, 1e-12)
        vertex = lowest + max(-1.0, min(1.0, vertex))
        nearest = min(trials, key=lambda position: abs(position - vertex))
        return tried(nearest if abs(nearest - vertex) < NEAR else vertex)

    @torch.no_grad()
    def _try(self, noise: float) -> Trial:
        seen = self.averages(noise, everything=False)
        temperature, _ = best_temperature(self.model.likelihood, *seen)
        losses, untempered = (
            losses_at(self.model.likelihood, *seen, each) for each in (temperature, self.usual)
        )
        return Trial(noise, temperature, losses, untempered.mean().item())

    @torch.no_grad()
    def averages(self, noise: float, *, everything: bool = True) -> tuple[Averages, Tensor]:
        """Averages over draws with this noise, which the model is left with, and targets."""
        self.evaluations += 1
        self.model.noise = noise
        # Without noise a component's draws are all alike.
        draws = self.model.method.components if noise == 0 else self.draws
        outputs, targets = [], []
        examples = kept = 0
        for inputs, target in self.batches:
            output, wanted = self._outputs(inputs, target, draws)
            outputs.append(output)
            targets.append(wanted)
            examples += len(inputs)
            kept += output.numel()
            if kept > LARGEST_OUTPUT or (not everything and examples >= SEARCH_EXAMPLES):
                break
        return averaged(self.model.likelihood, torch.cat(outputs, dim=1)), torch.cat(targets)

    def _outputs(self, inputs: Inputs, target: Any, draws: int) -> tuple[Tensor, Tensor]:
        model = self.model
        inputs = inputs.to(model.device)
        outputs = torch.cat(list(model.outputs(inputs, draws=draws, seed=self.seed)))
        wanted = model.likelihood.target(target, outputs[0])
        if model.likelihood.kind == "classes" and outputs.ndim > 3:
            outputs, wanted = outputs.flatten(3), wanted.flatten(1)
            step = math.ceil(outputs.shape[3] / POSITIONS)
            outputs, wanted = outputs[..., ::step], wanted[:, ::step]
        return outputs, wanted


def best_temperature(
    likelihood: "Likelihood", averages: Averages, target: Tensor
) -> tuple[float, float]:
    """The temperature with the lowest NLL for averages over draws, and that NLL.

    A prior log T ~ N(0, 0.5^2) counts as much as a few examples do: without it, a small set on
    which all is right asks for T near 0, and the first mistake on other data costs an infinite NLL.
    """
    from scipy.optimize import minimize_scalar

    def nll(log_temperature: float) -> float:
        return losses_at(likelihood, averages, target, math.exp(log_temperature)).mean().item()

    def penalised(log_temperature: float) -> float:
        return nll(log_temperature) + (log_temperature / TEMPERATURE_SPREAD) ** 2 / 2 / len(target)

    bounds = (math.log(COLDEST), math.log(HOTTEST))
    found = minimize_scalar(penalised, bounds=bounds, method="bounded")
    if nll(0.0) <= found.fun:
        return 1.0, nll(0.0)
    return math.exp(found.x), nll(found.x)


def best_slope(
    likelihood: "Likelihood", averages: Averages, target: Tensor
) -> tuple[float, float, float]:
    """The temperature and slope with the lowest NLL, and that NLL.

    Both have a prior, log T ~ N(0, 0.5^2) and slope ~ N(0, 0.25^2), so that a small set asks for
    hardly more than a temperature.
    """
    from scipy.optimize import minimize

    temperature, alone = best_temperature(likelihood, averages, target)
    if likelihood.kind == "values":
        return temperature, 0.0, alone

    def nll(log_temperature: float, slope: float) -> float:
        at = math.exp(log_temperature)
        return losses_at(likelihood, averages, target, at, slope).mean().item()

    def penalised(numbers: list[float]) -> float:
        prior = (numbers[0] / TEMPERATURE_SPREAD) ** 2 + (numbers[1] / SLOPE_SPREAD) ** 2
        return nll(*numbers) + prior / 2 / len(target)

    begin = math.log(temperature)
    found = minimize(
        penalised,
        [begin, 0.0],
        method="Nelder-Mead",
        options={
            "initial_simplex": [[begin, 0.0], [begin + 0.1, 0.0], [begin, -0.1]],
            "xatol": 1e-3,
            "fatol": 1e-7,
        },
    )
    together = nll(*found.x)
    if not together < alone:
        return temperature, 0.0, alone
    return math.exp(found.x[0]), float(found.x[1]), together


def highest_as_likely(
    likelihood: "Likelihood", averages: Averages, target: Tensor, temperature: float
) -> float:
    """The highest temperature whose NLL is above that of another by at most a standard error."""
    losses, higher = losses_at(likelihood, averages, target, temperature), temperature
    while higher < HOTTEST and as_likely(
        losses_at(likelihood, averages, target, higher * FINE), losses
    ):
        higher *= FINE
    return higher


def averaged(likelihood: "Likelihood", outputs: Tensor) -> Averages:
    """Averages over stacked outputs, from which a prediction is made at any temperature."""
    return {name: value.mean(0) for name, value in likelihood.statistics(outputs).items()}


def losses_at(
    likelihood: "Likelihood",
    averages: Averages,
    target: Tensor,
    temperature: float,
    slope: float = 0.0,
) -> Tensor:
    """Each example's NLL by averages over draws, at this temperature and slope."""
    return likelihood.nll(likelihood.pool(averages, temperature, slope), target)


def as_likely(losses: Tensor, others: Tensor, errors: float = 1.0) -> bool:
    """Whether some are above others by no more than some standard errors of the difference."""
    above = (losses - others).double()
    above = above.view(len(above), -1).mean(1)
    error = above.std().item() / math.sqrt(len(above)) if len(above) > 1 else 0.0
    return above.mean().item() <= errors * error
