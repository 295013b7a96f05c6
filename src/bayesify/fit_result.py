"""What a fit did, for people and for programs."""

import math
from dataclasses import dataclass, field


@dataclass
class FitResult:
    """What a fit did.

    Args:
        steps: Training steps done.
        seconds: Time taken, over all sessions of a resumed fit.
        kept: The state kept: "network" (noise 0), "untrained", "step N", or "solved" where a method
            computes rather than trains.
        network_nll: Held-out NLL of the network itself.
        untrained_nll: Held-out NLL of the posterior before training; nan for a mixture, whose parts
            have it.
        nll: Held-out NLL of the state kept; of a mixture, at its temperature.
        groups: How many draws a training batch had; None if every example had its own.
        history: (step, training loss, held-out NLL), at each validation.
        temperature: That of predictions from now on.
        tempered_nll: Held-out NLL of the state kept, with that.
        cache: How much was kept of the trunk's outputs, or why they were not.
        mirrored: Whether half of the draws see images mirrored from now on.
        parts: What the fits of a mixture's parts did, which then have groups, history and cache.
    """

    steps: int
    seconds: float
    kept: str
    network_nll: float
    untrained_nll: float
    nll: float
    groups: int | None
    history: list[tuple[int, float, float]] = field(repr=False)
    temperature: float = 1.0
    tempered_nll: float = math.nan
    cache: str = field(default="", repr=False, compare=False)
    mirrored: bool = False
    parts: tuple["FitResult", ...] = ()

    def __str__(self) -> str:
        if self.parts:
            together = f"together: held-out NLL {self.nll:.4f}{self._chosen()}"
            return "\n".join([*map(str, self.parts), together])
        trained = f"{self.steps} steps in {self.seconds:.0f} s ({describe_groups(self.groups)})"
        return (
            f"{trained if self.steps else 'no training steps'}; held-out NLL: the network "
            f"{self.network_nll:.4f}, untrained {self.untrained_nll:.4f}, kept {self.nll:.4f} "
            f"({self.kept}){self._tempered()}"
        )

    def _tempered(self) -> str:
        if math.isnan(self.tempered_nll):
            return ""
        return f", {self.tempered_nll:.4f}{self._chosen()}"

    def _chosen(self) -> str:
        mirrored = ", half of the draws mirrored" if self.mirrored else ""
        return f" at a temperature of {self.temperature:.3g}{mirrored}"


def describe_groups(groups: int | None) -> str:
    """How a training batch shares draws, for people."""
    if groups is None:
        return "a draw for each example"
    return f"{groups} draws a batch" if groups > 1 else "one draw a batch"
