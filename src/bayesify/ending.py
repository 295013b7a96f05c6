"""What a fit ends with: whether draws are mirrored, and a temperature."""

from typing import TYPE_CHECKING

import torch

from bayesify.calibration import (
    Calibration,
    Search,
    best_temperature,
    highest_as_likely,
    losses_at,
)
from bayesify.posterior import key
from bayesify.validation import HeldOut

if TYPE_CHECKING:
    from bayesify.model import BayesianModel

BY_HEART = 0.99  # of its training images that a network is right on


class Ending:
    """Chooses both by held-out data, at the noise that training was with.

    Data that the network has not seen are asked for the likeliest temperature. What training images
    say under strong augmentation depends on the network:

    - One that knows its images by heart is righter on them than it will be, strange as they are
      made, and the likeliest temperature is too low: of those as likely, the highest is taken.
    - One that does not finds them mostly strange, and the likeliest temperature is too high, while
      by the images as they are it is too low. So it is 1, unless both ask for more, or for less:
      then the one nearer to 1.

    Args:
        model: What is fitted. Asked before that, for what the network knows.
        held: Held-out data.
        seed: Of the fit.
    """

    def __init__(self, model: "BayesianModel", held: HeldOut, seed: int) -> None:
        self.model = model
        self.held = held
        self.seed = key("judge", seed)
        self.known = self._known()

    def _known(self) -> float | None:
        """The share of held-out training images, as they are, that the network is right on."""
        if self.held.originals is None:
            return None
        noise, self.model.noise = self.model.noise, 0.0
        try:
            draws = self.model.method.components
            return self.model.judge(self.held.originals, draws=draws, seed=self.seed)[1]
        finally:
            self.model.noise = noise

    @torch.no_grad()
    def choose(self, *, mirror: bool) -> Calibration:
        """Chooses; the model is left mirrored if that is better, and with no slope.

        A slope is left to `calibrate`: data that the network knows cannot tell it.

        Args:
            mirror: Whether to find out if draws should be mirrored.
        """
        model, draws = self.model, self.model.method.draws
        model.slope = 0.0
        search = Search(model, self.held.batches, draws, self.seed)
        if mirror:
            model.mirrored = search.better_mirrored()
        judged = search.averages(model.noise)
        temperature, _ = best_temperature(model.likelihood, *judged)
        if self.known is not None and self.held.originals is not None:
            if self.known >= BY_HEART:
                temperature = highest_as_likely(model.likelihood, *judged, temperature)
            else:
                original = Search(model, self.held.originals, draws, self.seed)
                lower, _ = best_temperature(model.likelihood, *original.averages(model.noise))
                temperature = sorted((lower, 1.0, temperature))[1]
        nll = losses_at(model.likelihood, *judged, temperature).mean().item()
        return Calibration(model.noise, temperature, nll, search.evaluations)
