"""An adaptive number of draws: easy inputs stop early, hard ones take them all.

Draws run in rounds, in each of which every component and every antithetic pair is complete. The
two draws of a pair are averaged first, since they are not independent. After n of N pairs, the
averages still have this far to go to what all draws will give, as a standard deviation:

    sqrt((1/n - 1/N) v),    v = ((n - 1) s^2 + 2 v0) / (n + 1)

s^2 is the variance between what pairs would predict alone: of noise, and of components where these
differ, which puts the error rather too high than too low. A few pairs that agree by chance would
make it 0, so that two pairs' worth of what is to be expected beforehand goes with it: v0 = p (1 -
p) / 5, or a fifth of a regression's epistemic variance. An example stops once `MARGIN` times that
is within the tolerance for all its classes and positions. A regression's tolerance is in units of
its predictive standard deviation.

The constants were chosen on training data (images clean, noisy and blended) so that fewer than 1 %
of examples end beyond the tolerance. benchmarks/adaptive_draws.py measured it on test images: at
most 0.5 %, among all. Among those that stopped it was at most 0.7 % of CIFAR-10; of SVHN, where
hardly any stop, up to a tenth of these few.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.batches import Inputs
from bayesify.errors import SettingError
from bayesify.likelihood import Averages
from bayesify.posterior import Draws
from bayesify.prediction import Prediction

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

FEWEST_PAIRS = 3
MARGIN = 3.5

# Of each example, by name: its row among the inputs, sums over draws, and moments of pairs.
Progress = dict[str, Tensor]
NOT_AVERAGED = ("row", "pair mean", "pair squares")


def check_tolerance(tolerance: float, *, keep_draws: bool = False) -> None:
    """Stops settings that cannot be meant.

    Raises:
        SettingError: If the tolerance is no number above 0, or draws are to be kept as well.
    """
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not number or not 0 < tolerance < math.inf:
        raise SettingError(
            f"tolerance={tolerance!r} must be a number above 0: 0.02 lets probabilities be off by "
            f"0.02. None runs all draws."
        )
    if keep_draws:
        raise SettingError(
            "keep_draws=True goes with all draws, and tolerance= leaves some out for most "
            "examples: drop one of them."
        )


@dataclass(frozen=True)
class Adaptive:
    """Predicts with as many draws as each example needs.

    Args:
        model: What predicts.
        draws: All its draws, in order.
        tolerance: How far probabilities may be from those that all draws give.
        memory_budget: See `Runner.outputs`.
    """

    model: "BayesianModel"
    draws: Draws
    tolerance: float
    memory_budget: int | None = None

    def rounds(self) -> Iterator[tuple[int, int]]:
        """The draws of each round: complete sets, twice as many in all each time."""
        most, components = self._most(), self.model.posterior.components
        start, end = 0, 2 * components * math.ceil(FEWEST_PAIRS / components)
        while start < most:
            yield start, min(end, most)
            start, end = end, 2 * end

    def predict(self, inputs: Inputs, size: int) -> Prediction:
        """Predicts, with at most `size` examples at once; those that go on are pooled."""
        finished, rows = [], []
        waiting: list[Progress] = [{"row": row} for row in torch.arange(len(inputs)).split(size)]
        for start, end in self.rounds():
            going = []
            for known in waiting:
                self._run(known, inputs, start, end, size)
                so_far = self._prediction(known, end)
                goes_on = self._goes_on(known, so_far, end)
                finished.append(so_far[~goes_on])
                rows.append(known["row"][~goes_on])
                going.append({name: value[goes_on] for name, value in known.items()})
            waiting = _pooled(going, size)
        return Prediction.cat(finished)[torch.cat(rows).argsort()].require_finite()

    def _run(self, known: Progress, inputs: Inputs, start: int, end: int, size: int) -> None:
        """Adds what the draws from `start` to `end` say to what is known."""
        rows, likelihood, runner = known["row"], self.model.likelihood, self.model.runner
        # Each new size needs a tape, so that rows that are left over are filled up to a few sizes.
        full = min(size, 1 << (len(rows) - 1).bit_length()) if start else len(rows)
        filled = rows[torch.arange(full) % len(rows)]
        part = inputs.map_batched(lambda t: t[filled.to(t.device)]).to(self.model.device)
        draws = {name: value[start:end] for name, value in self.draws.items()}
        unpaired: deque[Averages] = deque()
        index, pairs = start, start // 2
        for output in runner.outputs(draws, part, memory_budget=self.memory_budget):
            statistics = likelihood.statistics(output[:, : len(rows)])
            for name, value in statistics.items():
                known[name] = known.get(name, 0) + value.sum(0)
            for number in range(len(output)):
                draw = {name: value[number] for name, value in statistics.items()}
                if index // self.model.posterior.components % 2 == 0:
                    unpaired.append(draw)
                else:
                    pairs += 1
                    first = unpaired.popleft()
                    pair = {name: (first[name] + value) / 2 for name, value in draw.items()}
                    _add_pair(known, next(iter(self.model.pool(pair).values())), pairs)
                index += 1

    def _prediction(self, known: Progress, draws: int) -> Prediction:
        sums = {name: value for name, value in known.items() if name not in NOT_AVERAGED}
        used = torch.full((len(known["row"]),), draws, device=self.model.device)
        averages = self.model.pool({name: value / draws for name, value in sums.items()})
        return Prediction(self.model.likelihood.kind, averages, used=used)

    def _goes_on(self, known: Progress, so_far: Prediction, draws: int) -> Tensor:
        """Which examples need more than the draws they had."""
        if draws == self._most():
            return torch.zeros(len(so_far), dtype=torch.bool)
        pairs, most = draws // 2, self._most()
        values = so_far.kind == "values"
        expected = so_far.epistemic if values else so_far.probs * (1 - so_far.probs)
        variance = (known["pair squares"] + 2 * expected / 5) / (pairs + 1)
        to_go = variance * (1 / pairs - 2 / most)
        if values:
            # Last draws without their mirror images vary as if there were none.
            unpaired = most % (2 * self.model.posterior.components)
            to_go = (to_go + unpaired * so_far.epistemic / most**2) / so_far.variance
        error = MARGIN * to_go.sqrt()
        # Written so that a NaN is no reason to stop.
        return ~(error.reshape(len(error), -1).amax(1) <= self.tolerance).cpu()

    def _most(self) -> int:
        return len(next(iter(self.draws.values()))) if self.draws else 1


def _add_pair(known: Progress, pair: Tensor, pairs: int) -> None:
    """Adds one pair's average to mean and sum of squares, by Welford's way: nothing cancels."""
    mean = known.get("pair mean", torch.zeros_like(pair))
    moved = mean + (pair - mean) / pairs
    known["pair squares"] = known.get("pair squares", 0) + (pair - mean) * (pair - moved)
    known["pair mean"] = moved


def _pooled(parts: list[Progress], size: int) -> list[Progress]:
    """What is left of the parts, in parts of `size` again."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in (parts or [{}])[0]}
    starts = range(0, len(joined["row"]) if joined else 0, size)
    return [{name: value[i : i + size] for name, value in joined.items()} for i in starts]
