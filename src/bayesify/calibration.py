"""calibrate: chooses how strong the noise is, and a temperature, by held-out likelihood."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.batches import Inputs
from bayesify.validation import collect

if TYPE_CHECKING:
    from bayesify.likelihood import Likelihood
    from bayesify.model import BayesianModel

MOST_EXAMPLES = 5000
SEARCH_EXAMPLES = 1000
LARGEST_OUTPUT = 1 << 26  # numbers kept in memory at a time, over all draws
POSITIONS = 1024  # of a dense output, that count
TEMPERATURE_SPREAD = 0.5  # of the prior on log T: most networks want between 0.4 and 2.7


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose.

    Args:
        noise: The factor on the posterior's standard deviation.
        temperature: What each draw's logits are divided by.
        nll: Held-out negative log-likelihood with both.
        evaluations: How many strengths of noise were tried.
    """

    noise: float
    temperature: float
    nll: float
    evaluations: int


@dataclass(frozen=True)
class _Trial:
    noise: float
    temperature: float
    nll: float


class Search:
    """Finds the noise with the lowest NLL, each at its own best temperature.

    All strengths of noise share their random numbers, so that NLL is a smooth function of the
    noise and a few evaluations find its minimum: a walk in steps of a factor 1.41, then a parabola
    through the lowest three. The search sees a part of the data; the choice between its result and
    no noise at all sees everything.

    Noise and temperature can stand in for each other: strong noise with draws sharpened to mere
    votes is as likely as less noise with draws that know doubt, and tells strange inputs apart
    worse. So with noise the temperature is at least 1, or what the network itself asks for.
    """

    def __init__(
        self, model: "BayesianModel", loader: Iterable[Any], draws: int, seed: int
    ) -> None:
        self.model = model
        self.batches = collect(loader, seed, most=MOST_EXAMPLES).batches
        self.draws = draws
        self.seed = seed
        self.coldest = 0.0
        self.evaluations = 0

    def run(self) -> Calibration:
        """Searches; the model is left with the noise it had."""
        before = self.model.noise
        self.model.estimate_noise(self.batches)
        try:
            quiet = noisy = self._quiet()
            if self.model.posterior.varies():
                noisy = self._try(self._search(before), everything=True)
        finally:
            self.model.noise = before
        best = min(quiet, noisy, key=lambda trial: trial.nll)
        return Calibration(best.noise, best.temperature, best.nll, self.evaluations)

    def temper(self) -> Calibration:
        """Chooses the temperature alone, at the noise that the model has."""
        noise = self.model.noise
        try:
            best = self._quiet()
            if noise and self.model.posterior.varies():
                best = self._try(noise, everything=True)
        finally:
            self.model.noise = noise
        return Calibration(noise, best.temperature, best.nll, self.evaluations)

    def _quiet(self) -> _Trial:
        """No noise, which also says how low the temperature may go with it."""
        quiet = self._try(0.0, everything=True)
        self.coldest = min(1.0, quiet.temperature)
        return quiet

    def _search(self, start: float) -> float:
        start = start or self.model.method.noise or 0.1
        trials = {0: self._try(start)}
        for direction in (1, -1):
            position = 0
            while abs(position) < 6:
                position += direction
                trials[position] = self._try(start * 2 ** (position / 2))
                if trials[position].nll >= trials[position - direction].nll:
                    break
            if position != 1:
                break  # larger noise was better than the start: no need to look below it
        lowest = min(trials, key=lambda position: trials[position].nll)
        if lowest - 1 not in trials or lowest + 1 not in trials:
            return trials[lowest].noise
        left, middle, right = (trials[lowest + step].nll for step in (-1, 0, 1))
        vertex = lowest + 0.5 * (left - right) / max(left - 2 * middle + right, 1e-12)
        return float(start * 2 ** (max(lowest - 1.0, min(lowest + 1.0, vertex)) / 2))

    @torch.no_grad()
    def _try(self, noise: float, *, everything: bool = False) -> _Trial:
        self.evaluations += 1
        self.model.noise = noise
        # Without noise a component's draws are all alike.
        draws = self.model.method.components if noise == 0 else self.draws
        outputs, targets = [], []
        seen = kept = 0
        for inputs, target in self.batches:
            output, wanted = self._outputs(inputs, target, draws)
            outputs.append(output)
            targets.append(wanted)
            seen += len(inputs)
            kept += output.numel()
            if kept > LARGEST_OUTPUT or (not everything and seen >= SEARCH_EXAMPLES):
                break
        temperature, nll = best_temperature(
            self.model.likelihood, torch.cat(outputs, dim=1), torch.cat(targets), self.coldest
        )
        return _Trial(noise, temperature, nll)

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
    likelihood: "Likelihood", outputs: Tensor, target: Tensor, coldest: float = 0.0
) -> tuple[float, float]:
    """The temperature, at least `coldest`, with the lowest NLL for stacked outputs, and that NLL.

    A prior log T ~ N(0, 0.5^2) counts as much as a few examples do. Without it, a small set on
    which some draw is always right asks for T near 0: every draw becomes a vote that knows no
    doubt, and the first unanimous mistake on other data costs an infinite NLL.
    """
    from scipy.optimize import minimize_scalar

    def nll(log_temperature: float) -> float:
        tempered = likelihood.temper(outputs, math.exp(log_temperature))
        averages = {name: value.mean(0) for name, value in likelihood.statistics(tempered).items()}
        return likelihood.nll(averages, target).mean().item()

    def penalised(log_temperature: float) -> float:
        return nll(log_temperature) + (log_temperature / TEMPERATURE_SPREAD) ** 2 / 2 / len(target)

    bounds = (math.log(max(coldest, 0.02)), math.log(50))
    found = minimize_scalar(penalised, bounds=bounds, method="bounded")
    if nll(0.0) <= found.fun:
        return 1.0, nll(0.0)
    return math.exp(found.x), nll(found.x)
