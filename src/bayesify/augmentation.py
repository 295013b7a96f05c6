"""Changing images so that a network has to think again.

Functions of a batch of images `[B, C, H, W]`, in whatever units the network takes. They use torch's
global random numbers, which `fit` seeds for every step.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bayesify.errors import SettingError

Augment = Callable[[Tensor], Tensor]


def crop_and_flip(images: Tensor) -> Tensor:
    """Shifts images by up to an eighth of their size, edges reflected, and mirrors half of them."""
    batch, _, height, width = images.shape
    pad_y, pad_x = max(1, height // 8), max(1, width // 8)
    padded = functional.pad(images, (pad_x, pad_x, pad_y, pad_y), mode="reflect")
    top = torch.randint(0, 2 * pad_y + 1, (batch, 1)) + torch.arange(height)
    left = torch.randint(0, 2 * pad_x + 1, (batch, 1)) + torch.arange(width)
    left = torch.where(torch.rand(batch, 1) < 0.5, left.flip(1), left)
    rows = torch.arange(batch)[:, None, None]
    shifted = padded.permute(0, 2, 3, 1)[rows, top[:, :, None], left[:, None, :]]
    return shifted.permute(0, 3, 1, 2).contiguous()


def strong(images: Tensor) -> Tensor:
    """Rotates, scales, shifts, recolours, blots out a part and adds noise, without mirroring.

    Strong enough that a network which knows its training images by heart errs on them as it errs
    on new ones, so that they can judge its calibration.
    """
    return _blot(_recolour(_move(images)))


AUGMENTATIONS: dict[str, Augment] = {"crop-flip": crop_and_flip, "strong": strong}


def as_augment(augment: str | Augment | None) -> Augment | None:
    """An augmentation by name, or as it is.

    Raises:
        SettingError: If there is none of that name.
    """
    if isinstance(augment, str):
        if augment not in AUGMENTATIONS:
            raise SettingError(
                f"augment={augment!r} is not known. Use one of {', '.join(AUGMENTATIONS)}, or a "
                f"function of a batch of inputs."
            )
        return AUGMENTATIONS[augment]
    return augment


def _uniform(batch: int, low: float, high: float, *more: int) -> Tensor:
    return torch.empty(batch, *more).uniform_(low, high)


def _move(images: Tensor) -> Tensor:
    batch = len(images)
    angle = _uniform(batch, -math.pi / 18, math.pi / 18)
    shear = _uniform(batch, -0.1, 0.1)
    zoom = _uniform(batch, 0.9, 1.1)
    affine = torch.stack(
        [
            zoom * angle.cos(),
            -zoom * (angle.sin() + shear),
            _uniform(batch, -0.13, 0.13),
            zoom * angle.sin(),
            zoom * angle.cos(),
            _uniform(batch, -0.13, 0.13),
        ],
        dim=1,
    ).view(batch, 2, 3)
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    return functional.grid_sample(
        images, grid.to(images), padding_mode="reflection", align_corners=False
    )


def _recolour(images: Tensor) -> Tensor:
    batch, channels = images.shape[:2]
    mean = images.mean((1, 2, 3), keepdim=True)
    spread = images.std((1, 2, 3), keepdim=True)
    gain = _uniform(batch, 0.75, 1.25, 1, 1, 1) * _uniform(batch, 0.9, 1.1, channels, 1, 1)
    lift = _uniform(batch, -0.25, 0.25, 1, 1, 1)
    grain = 0.1 * torch.randn(images.shape) * _uniform(batch, 0, 1, 1, 1, 1)
    return (images - mean) * gain.to(images) + mean + spread * (lift + grain).to(images)


def _blot(images: Tensor) -> Tensor:
    batch, _, height, width = images.shape
    side = _uniform(batch, 0.2, 0.45, 1)
    centre_y, centre_x = _uniform(batch, 0, 1, 1), _uniform(batch, 0, 1, 1)
    inside_y = ((torch.arange(height) + 0.5) / height - centre_y).abs() < side / 2
    inside_x = ((torch.arange(width) + 0.5) / width - centre_x).abs() < side / 2
    blot = inside_y[:, None, :, None] & inside_x[:, None, None, :]
    blot &= torch.rand(batch, 1, 1, 1) < 0.25
    return torch.where(blot.to(images.device), images.mean((1, 2, 3), keepdim=True), images)
