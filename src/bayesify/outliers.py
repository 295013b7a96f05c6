"""Inputs on which a network should not be sure, for methods that train on them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.augmentation import crop_and_flip
from bayesify.batches import Inputs, split_batch
from bayesify.errors import DataError, SettingError
from bayesify.posterior import key
from bayesify.validation import seeded

MOST_EXAMPLES = 5000
MOST_BYTES = 512 << 20

Normalisation = tuple[Sequence[float], Sequence[float]]
Loss = Callable[[Inputs], Tensor]


class Outliers:
    """Training inputs under noise, inputs of the user's, or half of each.

    Which ones a step gets depends on its seed and on the network alone, so that a fit can be
    resumed.

    Args:
        radius: Largest noise in pixel units, where pixels run from 0 to 1; 0 for none.
        given: Batches of the user's inputs, of which up to 5,000 are kept in memory.
        normalisation: Mean and standard deviation of each channel, by which pixels were normalised;
            None if the network takes pixels as they are.
        steps: The noise, uniform at first, is turned against the network by up to so many steps.
    """

    def __init__(
        self,
        radius: float,
        given: Iterable[Any] | None,
        normalisation: Normalisation | None,
        steps: int = 0,
    ) -> None:
        self.radius = radius
        self.steps = steps
        self.given = None if given is None else _collect(given)
        self.normalisation = normalisation

    def check(self, inputs: Inputs) -> None:
        """Raises if they cannot stand beside these training inputs."""
        image = _image(inputs)
        if self.given is not None and self.given.shape[1:] != image.shape[1:]:
            raise DataError(
                f"the OOD loader yields inputs of shape {list(self.given.shape[1:])} and the "
                f"training data {list(image.shape[1:])}: they must agree. Resize the OOD inputs."
            )
        if self.radius:
            self._check_pixels(image)

    def batch(self, inputs: Inputs, seed: int, loss: Loss | None = None) -> Inputs:
        """Half as many outliers as there are training inputs, one at least.

        Args:
            inputs: Training inputs.
            seed: Decides which outliers.
            loss: Of the first of these inputs, each, as they change: what noise is to raise.
        """
        image = _image(inputs)
        count = (len(image) + 1) // 2
        with seeded(key("outliers", seed)):
            if self.given is None:
                return _with_image(inputs[:count], self._noisy(inputs[:count], loss))
            rows = torch.randint(len(self.given), (count,))
            given = self.given[rows]
            if given.ndim == 4 and min(given.shape[2:]) >= 4:
                given = crop_and_flip(given)
            if self.radius:
                half = count // 2
                given = torch.cat([self._noisy(inputs[:half], loss), given.to(image)[half:]])
        return _with_image(inputs[:count], given.to(image))

    def _check_pixels(self, image: Tensor) -> None:
        mean, std = self._moments(image)
        channels = image.shape[1]
        if not {mean.numel(), std.numel()} <= {1, channels} or not (std > 0).all():
            raise SettingError(
                f"normalisation={self.normalisation!r} must be (mean, std), each with a number for "
                f"every one of {channels} channels, and std above 0."
            )
        low, high = (image * std + mean).aminmax()
        # Some augmentations of normalised images leave the range, though never by far.
        slack = 1e-3 if self.normalisation is None else 1.0
        if not -slack <= low <= high <= 1 + slack:
            raise SettingError(
                f"ood_radius={self.radius} is in pixel units, and in these the inputs run from "
                f"{low:.2f} to {high:.2f} where 0 to 1 is expected. Pass normalisation=(mean, "
                f"std), by which pixels from 0 to 1 were normalised."
            )

    def _moments(self, image: Tensor) -> list[Tensor]:
        shape = (1, -1, *(1 for _ in image.shape[2:]))
        given = ([0.0], [1.0]) if self.normalisation is None else self.normalisation
        return [torch.as_tensor(v, dtype=torch.float32).view(shape).to(image) for v in given]

    def _noisy(self, inputs: Inputs, loss: Loss | None) -> Tensor:
        image = _image(inputs)
        mean, std = self._moments(image)
        pixels = image * std + mean
        low, high = (pixels - self.radius).clamp(0, 1), (pixels + self.radius).clamp(0, 1)
        noise = self.radius * (2 * torch.rand(image.shape) - 1).to(image)
        noisy = ((pixels + noise).clamp(low, high) - mean) / std
        if loss is None:
            return noisy
        steps = int(torch.randint(self.steps + 1, ()))
        for _ in range(steps):
            noisy.requires_grad_()
            with torch.enable_grad():
                total = loss(_with_image(inputs, noisy)).sum()
            (slope,) = torch.autograd.grad(total, noisy)
            # Twice the radius in all: as far as the other side of the image.
            moved = noisy.detach() * std + mean + 2 * self.radius / steps * slope.sign()
            noisy = (moved.clamp(low, high) - mean) / std
        return noisy


def _collect(given: Iterable[Any]) -> Tensor:
    parts: list[Tensor] = []
    count = size = 0
    for batch in given:
        inputs = split_batch(batch)[0]
        inputs.require_finite()
        parts.append(_image(inputs))
        if parts[-1].shape[1:] != parts[0].shape[1:]:
            raise DataError(
                f"the OOD loader yields inputs of shapes {list(parts[0].shape[1:])} and "
                f"{list(parts[-1].shape[1:])}: they must agree. Resize the OOD inputs."
            )
        count += len(parts[-1])
        size += parts[-1].nbytes
        if count >= MOST_EXAMPLES or size >= MOST_BYTES:
            break
    if not parts:
        raise DataError("the OOD loader is empty: it yields no batch.")
    return torch.cat(parts)


def _image(inputs: Inputs) -> Tensor:
    numbers = [tensor for tensor in inputs.tensors() if tensor.is_floating_point()]
    if len(numbers) != 1 or numbers[0].ndim < 2:
        raise SettingError(
            f"training on OOD data needs inputs with one tensor of real numbers, and these are "
            f"{inputs.describe()}."
        )
    return numbers[0]


def _with_image(inputs: Inputs, image: Tensor) -> Inputs:
    old = _image(inputs)
    return inputs.map(lambda tensor: image if tensor is old else tensor)
