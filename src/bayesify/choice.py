"""What `where="auto"` tried, and what it chose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROUNDING = 1e-4  # nats: what calibration may differ by where candidates are the same function


@dataclass(frozen=True)
class Candidate:
    """A part of a network, and what making it random gave.

    Args:
        where: How many sites: the last ones in execution order.
        numbers: Random numbers of one draw.
        noise: The noise chosen for it.
        temperature: The temperature chosen for it.
        nll: Mean NLL of the examples that judge.
        worse: How much higher that is than the best candidate's.
        error: Standard error of `worse`, which is a mean over the same examples.
        cost: Operations of a prediction, as a share of those with everything random.
    """

    where: int
    numbers: int
    noise: float
    temperature: float
    nll: float
    worse: float
    error: float
    cost: float


@dataclass(frozen=True)
class Choice:
    """What `where="auto"` tried, and what it chose. Prints as a table.

    Args:
        candidates: What was tried, the cheapest first.
        order: Names of all sites, in execution order.
        examples: How many examples judged.
        augmented: Whether these were training images under strong augmentation.
    """

    candidates: tuple[Candidate, ...]
    order: tuple[str, ...]
    examples: int
    augmented: bool

    @property
    def chosen(self) -> Candidate:
        """The cheapest that is worse than the best by no more than a standard error."""
        return next(each for each in self.candidates if each.worse <= max(each.error, ROUNDING))

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites chosen."""
        return self.order[-self.chosen.where :]

    def __str__(self) -> str:
        lines = [f"{'random sites':<18}{'numbers':>10}{'noise':>8}{'NLL':>9}{'worse by':>20}  cost"]
        for each in self.candidates:
            sites = f"last {each.where}" if each.where < len(self.order) else f"all {each.where}"
            worse = f"{each.worse:.4f} +- {each.error:.4f}" if each.worse else "the best"
            lines.append(
                f"{sites + (', chosen' if each == self.chosen else ''):<18}{each.numbers:>10,}"
                f"{each.noise:>8.3g}{each.nll:>9.4f}{worse:>20}{each.cost:>6.0%}"
            )
        what = "training images, strongly augmented" if self.augmented else "examples"
        return "\n".join([*lines, f"judged by {self.examples:,} {what}"])

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Choice":
        """What `dataclasses.asdict` gave, after JSON too."""
        candidates = tuple(Candidate(**each) for each in stored["candidates"])
        return cls(**{**stored, "candidates": candidates, "order": tuple(stored["order"])})
