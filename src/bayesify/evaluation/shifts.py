r"""Images that get worse step by step, and what a network says of them.

A network should doubt more, the less is left to see. Gaussian noise is mixed in as by iBNN's
authors (Trinh et al., *Scalable Bayesian neural networks by layer-wise input augmentation*,
equation 28), $\hat x = (1 - \gamma) x + \gamma \epsilon$ with $\epsilon \sim N(0, I)$, and is not
cut to the pixels' range; salt and pepper sets each number to 0 or 1 with probability p.

Everything happens to pixels from 0 to 1. A severity of 0 leaves an image as it is. All severities
of a sweep share their random numbers, so that what changes between them is the severity alone.
"""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.batches import Inputs, labelled
from bayesify.errors import DataError, SettingError
from bayesify.evaluation.pixels import Scale
from bayesify.evaluation.report import measure
from bayesify.outliers import Normalisation
from bayesify.posterior import key

if TYPE_CHECKING:
    from bayesify.model import BayesianModel


def mix_gaussian(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Mixes a share of standard normal noise into 1 - share of the image."""
    noise = torch.randn(pixels.shape, generator=generator).to(pixels)
    return (1 - severity) * pixels + severity * noise


def salt_and_pepper(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Sets each number to 0 or 1 with a probability."""
    hit, side = torch.rand(2, *pixels.shape, generator=generator).to(pixels)
    return torch.where(hit < severity, (side < 0.5).to(pixels), pixels)


def blur(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """Gaussian blur; the severity is its standard deviation in pixels."""
    from scipy.ndimage import gaussian_filter

    blurred = gaussian_filter(pixels.cpu().numpy(), (0, 0, severity, severity), mode="nearest")
    return torch.from_numpy(blurred).to(pixels)


def fade(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """Takes a share of the contrast away, towards the image's mean."""
    return torch.lerp(pixels, pixels.mean((1, 2, 3), keepdim=True).expand_as(pixels), severity)


def rotate(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """Rotates by degrees, counter-clockwise; what comes into view repeats the edge."""
    height, width = pixels.shape[2:]
    sine, cosine = math.sin(math.radians(severity)), math.cos(math.radians(severity))
    affine = [[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]]
    grid = functional.affine_grid(
        torch.tensor([affine]).expand(len(pixels), 2, 3), list(pixels.shape), align_corners=False
    )
    return functional.grid_sample(
        pixels, grid.to(pixels), padding_mode="border", align_corners=False
    )


def jpeg(pixels: Tensor, severity: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """Compresses as JPEG of quality 100 - severity, and back.

    Raises:
        DataError: If images have neither one channel nor three.
    """
    if pixels.shape[1] not in (1, 3):
        raise DataError(f"JPEG takes 1 or 3 channels, and these images have {pixels.shape[1]}.")
    levels = (pixels.cpu().clamp(0, 1) * 255).round().byte().movedim(1, -1)
    return torch.stack([_recompressed(image, 100 - round(severity)) for image in levels]).to(pixels)


def _recompressed(levels: Tensor, quality: int) -> Tensor:
    import numpy as np
    from PIL import Image

    packed = io.BytesIO()
    Image.fromarray(levels.squeeze(-1).numpy()).save(packed, "JPEG", quality=quality)
    with Image.open(packed) as image:
        read = torch.from_numpy(np.array(image)).reshape(levels.shape)
    return read.movedim(-1, 0).float() / 255


@dataclass(frozen=True)
class Shift:
    """A way in which images get worse.

    Args:
        apply: A function of pixels `[B, C, H, W]`, the severity and a random generator.
        unit: What the severity is, for an axis.
        most: The largest severity.
        severities: Those of a sweep, by default.
    """

    apply: Callable[[Tensor, float, torch.Generator], Tensor]
    unit: str
    most: float
    severities: tuple[float, ...]


_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SHIFTS = {
    "gaussian": Shift(mix_gaussian, "share of noise", 1.0, _SHARES),
    "salt-and-pepper": Shift(salt_and_pepper, "share of numbers hit", 1.0, _SHARES),
    "blur": Shift(blur, "standard deviation in pixels", math.inf, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)),
    "contrast": Shift(fade, "share of contrast lost", 1.0, _SHARES),
    "rotation": Shift(rotate, "degrees", 360.0, (0.0, 15.0, 30.0, 45.0, 60.0, 90.0, 135.0, 180.0)),
    "jpeg": Shift(jpeg, "100 - quality", 99.0, (0.0, 20.0, 40.0, 60.0, 80.0, 90.0, 95.0)),
}


def shift(
    images: Tensor,
    kind: str,
    severity: float,
    *,
    normalisation: Normalisation | None = None,
    seed: int = 0,
) -> Tensor:
    """Images with a shift of `SHIFTS`, in the units they came in.

    Args:
        images: As the network takes them, `[B, C, H, W]`.
        kind: "gaussian", "salt-and-pepper", "blur", "contrast", "rotation" or "jpeg".
        severity: How strong, in the unit of the shift; 0 leaves images as they are.
        normalisation: Mean and standard deviation of each channel, by which pixels were normalised;
            None if the network takes pixels as they are.
        seed: Of the random numbers.

    Raises:
        SettingError: If there is no such shift, or the severity is out of its range.
        DataError: If these are not images whose pixels run from 0 to 1.

    Example:
        >>> shift(torch.tensor([[[[0.0, 1.0]]]]), "contrast", 0.5)
        tensor([[[[0.2500, 0.7500]]]])
    """
    found = _find(kind, [severity])
    scale = Scale(images, normalisation)
    if images.ndim != 4:
        raise DataError(
            f"a shift takes images [batch, channels, height, width], and these are "
            f"{list(images.shape)}."
        )
    if severity == 0:
        return images.clone()
    generator = torch.Generator().manual_seed(key("shift", seed))
    return scale.inputs(found.apply(scale.pixels(images), severity, generator))


@dataclass(frozen=True)
class ShiftPoint:
    """What a network says of images at one severity: means over examples.

    Args:
        severity: In the unit of the shift.
        uncertainty: Total: the predictive entropy in nats, or the variance.
        aleatoric: Its part that is the data's.
        epistemic: Its part that is the model's own.
        nll: Negative log-likelihood.
        accuracy: Share of right answers, where there are any.
    """

    severity: float
    uncertainty: float
    aleatoric: float
    epistemic: float
    nll: float
    accuracy: float | None


def sweep(
    model: "BayesianModel",
    loader: Iterable[Any],
    kind: str,
    severities: Sequence[float] | None = None,
    *,
    normalisation: Normalisation | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> list[ShiftPoint]:
    """Mean uncertainty, split in two, accuracy and NLL as images get worse.

    Goes through the data once and keeps no prediction.

    Args:
        model: What is asked.
        loader: Images and targets.
        kind: See `shift`.
        severities: In the unit of the shift; its own by default.
        normalisation: See `shift`.
        draws: Draws of a prediction.
        seed: Seed of the draws and of what is random in the shift.
    """
    levels = list(_find(kind, severities).severities if severities is None else severities)
    totals = [_Totals() for _ in levels]
    for number, (inputs, target) in enumerate(labelled(loader)):
        images = _images(inputs)
        for level, total in zip(levels, totals, strict=True):
            noise_seed = key("sweep", seed, number)
            worse = shift(images, kind, level, normalisation=normalisation, seed=noise_seed)
            prediction = model.predict(worse, draws=draws, seed=seed)
            for name in ("uncertainty", "aleatoric", "epistemic"):
                total.add(name, getattr(prediction, name))
            found = measure(model, prediction, target)
            for name in ("nll", "correct"):
                if name in found:
                    total.add(name, found[name])
    return [total.point(level) for level, total in zip(levels, totals, strict=True)]


class _Totals:
    """Sums and counts by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, values: Tensor) -> None:
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + values.double().sum().item(), count + values.numel())

    def point(self, severity: float) -> ShiftPoint:
        means = {name: total / max(1, count) for name, (total, count) in self.sums.items()}
        accuracy = means.pop("correct", None)
        return ShiftPoint(severity, **means, accuracy=accuracy)


def _find(kind: str, severities: Sequence[float] | None) -> Shift:
    if kind not in SHIFTS:
        raise SettingError(f"kind={kind!r} must be one of {', '.join(SHIFTS)}.")
    found = SHIFTS[kind]
    for severity in severities or ():
        if not (0 <= severity <= found.most and math.isfinite(severity)):
            raise SettingError(
                f"severity={severity!r} of {kind} ({found.unit}) must be from 0 to {found.most:g}."
            )
    return found


def _images(inputs: Inputs) -> Tensor:
    if len(inputs.args) != 1 or inputs.kwargs or not isinstance(inputs.args[0], Tensor):
        raise DataError(f"a shift takes batches of images, and these are {inputs.describe()}.")
    return inputs.args[0]
