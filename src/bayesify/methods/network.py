"""The network itself, as it is and with its confidence corrected: what every method must beat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from bayesify.methods.method import Method
from bayesify.posterior import Fixed, Posterior
from bayesify.sites import Site, Skipped


@dataclass(frozen=True, kw_only=True)
class MAP(Method):
    """The network as it is, at the maximum a posteriori: one draw, always the same.

    Args:
        noise: Nothing is random, so that no factor changes anything.
        draws: One says all.
    """

    noise: float = 0.0
    draws: int = 1

    tempers: ClassVar[bool] = False
    tempers_by_doubt: ClassVar[bool] = False

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:  # noqa: ARG002
        """Nothing."""
        return [], []

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:  # noqa: ARG002
        """Certainty."""
        return Fixed()


@dataclass(frozen=True, kw_only=True)
class Temperature(MAP):
    """The network with all logits divided by one number, chosen on held-out data.

    Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017
    (https://arxiv.org/abs/1706.04599). `fit` chooses it on its validation data, `calibrate` on what
    it is given.
    """

    tempers: ClassVar[bool] = True
