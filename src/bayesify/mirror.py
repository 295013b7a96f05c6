"""Mirrored draws: every second draw of a component sees images left to right.

Whoever trains on mirrored images says that they show the same things. A network seldom answers
alike for both, so that its two answers are worth more than one: as draws are many in any case, half
of them look at the image from the other side, at no cost. In a pair of draws with opposite noise
one does, so that what cancels within pairs still does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.augmentation import Augment, as_augment, crop_and_flip
from bayesify.gates import map_images

MIRROR = "input_mirror"


def add_mirror(network: nn.Module) -> None:
    """Puts a gate before a private copy of a network, which mirrors images when it is true."""
    if MIRROR in network._buffers:
        return
    device = next(network.parameters()).device
    network.register_buffer(MIRROR, torch.tensor(False, device=device), persistent=False)
    network.register_forward_pre_hook(_mirror_input, with_kwargs=True)


def worth_trying(mirror: bool | None, augment: str | Augment | None, *, shares_trunk: bool) -> bool:
    """Whether `fit` should find out if draws are better mirrored.

    Args:
        mirror: What the user says of it; None: what the augmentation does.
        augment: Of training images.
        shares_trunk: Whether draws have layers in common, which would have to run for both sides.
    """
    mirrors = as_augment(augment) is crop_and_flip if mirror is None else mirror
    return mirrors and not shares_trunk


def mirrored(indices: Sequence[int], components: int, device: torch.device) -> Tensor:
    """Which of these draws see images mirrored: those whose noise is that of an earlier, negated.

    Example:
        >>> mirrored(range(6), 2, torch.device("cpu")).int()
        tensor([0, 0, 1, 1, 0, 0], dtype=torch.int32)
    """
    return torch.tensor([index // components % 2 == 1 for index in indices], device=device)


def _mirror_input(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    gate = network.get_buffer(MIRROR)

    def mirror(images: Tensor) -> Tensor:
        return torch.where(gate, images.flip(-1), images)

    return map_images(mirror, args, kwargs, "mirrored draws see", "Set mirrored=False.")
