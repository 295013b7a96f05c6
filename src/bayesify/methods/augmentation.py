r"""Test-time augmentation: each draw sees the images moved a little.

Wang et al., *Aleatoric uncertainty estimation with test-time augmentation for medical image
segmentation with convolutional neural networks*, Neurocomputing 2019
(https://arxiv.org/abs/1807.07356).

A draw is the network on images under one random affine map, the same for all images. A pixel u of
the new image, counted from the centre, is read at

$$A u + t, \qquad A = e^{-\alpha \zeta} R(\alpha \theta)\, \mathrm{diag}(\pm 1, 1)$$

with a shift $t \sim N(0, (\alpha s)^2)$, a rotation by $\theta$ and a zoom by $e^\zeta$, all
Gaussian, and a mirroring with probability $\min(\alpha, 1) / 2$. With $\alpha = 0$ the images are
left alone. Beyond their edges they are reflected.

The weights are certain here, so what this calls the model's own doubt is the network's sensitivity
to how the image was taken. Outputs are not moved back, so this fits networks with one
output for an image: those with one for each pixel would answer for pixels elsewhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.errors import SettingError
from bayesify.gates import map_images
from bayesify.methods.method import Method
from bayesify.posterior import Draws, Posterior
from bayesify.sites import Site, Skipped

GATE = "input_map"


@dataclass(frozen=True, kw_only=True)
class TestTimeAugmentation(Method):
    """Predictions averaged over mirrored, shifted, rotated and zoomed images.

    For networks with one output for an image, not for segmentation: outputs are not moved back.

    Args:
        noise: alpha, a factor on all standard deviations, and up to 1 on how often is mirrored.
        draws: Draws of a prediction.
        flip: Whether half of the draws mirror left and right.
        shift: Standard deviation of the shift, as a fraction of height and width.
        rotate: Standard deviation of the angle, in degrees.
        zoom: Standard deviation of the logarithm of the magnification.

    Example:
        >>> sites, _ = TestTimeAugmentation().find(nn.Conv2d(3, 8, 3))
        >>> sites[0].name
        'input_map'
    """

    __test__ = False  # pytest takes every class called Test... for a test

    noise: float = 1.0
    draws: int = 16
    flip: bool = True
    shift: float = 0.03
    rotate: float = 5.0
    zoom: float = 0.05

    def __post_init__(self) -> None:
        self.check_numbers("shift", "rotate", "zoom")
        if not (self.flip or self.shift or self.rotate or self.zoom):
            raise SettingError(
                "flip=False and shift, rotate and zoom of 0 leave nothing random. Turn one on, or "
                "use MAP, the network as it is."
            )
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """A map before the whole network."""
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
        identity = torch.eye(2, 3, dtype=like.dtype, device=like.device)
        network.register_buffer(GATE, identity, persistent=False)
        network.register_forward_pre_hook(_move_input, with_kwargs=True)
        return [Site(GATE, tuple(identity.shape), type(network).__name__)], []

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:  # noqa: ARG002
        """Random maps around the identity."""
        return Maps(tensors[GATE], self)


class Maps(Posterior):
    """Random affine maps, `[2, 3]` matrices. Nothing of them is trained and nothing stored.

    Args:
        identity: The map that changes nothing.
        spread: How far maps are from it.
    """

    components = 1
    like: Tensor

    def __init__(self, identity: Tensor, spread: TestTimeAugmentation) -> None:
        super().__init__()
        self.noise = spread.noise
        self._spread = spread
        self.register_buffer("like", identity.new_empty(0), persistent=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Mirroring, two shifts, angle and zoom."""
        return {GATE: (5,)}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """Maps of shifts in halves of height and width, as `grid_sample` counts."""
        mirror, across, down, turn, grow = noise[GATE].unbind(1)
        spread = self._spread
        angle = self.noise * math.radians(spread.rotate) * turn
        size = torch.exp(-self.noise * spread.zoom * grow)
        shift = self.noise * spread.shift * 2
        mirrored = mirror < _quantile(min(self.noise, 1) / 2 if spread.flip else 0)
        side = 1 - 2 * mirrored.to(size.dtype)
        cosine, sine = size * angle.cos(), size * angle.sin()
        entries = [side * cosine, -sine, shift * across, side * sine, cosine, shift * down]
        return {GATE: torch.stack(entries, 1).reshape(-1, 2, 3).to(self.like.dtype)}


def _quantile(probability: float) -> float:
    """Of a standard normal number."""
    return NormalDist().inv_cdf(probability) if probability > 0 else -math.inf


def _move_input(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves the images among the arguments."""
    affine = network.get_buffer(GATE)
    who, instead = "TestTimeAugmentation moves", "Use another method, such as MCDropout."
    return map_images(lambda x: move(x, affine), args, kwargs, who, instead)


def move(images: Tensor, affine: Tensor) -> Tensor:
    """Images under an affine map; bit for bit the same under the identity.

    Args:
        images: `[B, C, H, W]`.
        affine: Where a pixel is read, `[2, 3]`, in halves of height and width but square in pixels.

    Example:
        >>> move(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[-1.0, 0, 0], [0, 1, 0]]))
        tensor([[[[2., 1.]]]])
    """
    exact = torch.promote_types(images.dtype, torch.float32)  # halves cannot count pixels
    affine = affine.to(images.device, exact)
    size, height, width = len(images), *images.shape[-2:]
    rows, columns = torch.meshgrid(_centres(height, affine), _centres(width, affine), indexing="ij")
    ratio = height / width
    square = affine.new_tensor([[1, ratio, 1], [1 / ratio, 1, 1]])
    grid = torch.stack([columns, rows, torch.ones_like(rows)], -1) @ (affine * square).T
    moved = functional.grid_sample(
        images.to(exact),
        grid.expand(size, -1, -1, -1),
        mode="bicubic",  # linear interpolation blurs: networks on small images lose by it
        padding_mode="reflection",
        align_corners=False,
    )
    same = (affine == torch.eye(2, 3, dtype=exact, device=images.device)).all()
    return torch.where(same, images, moved.to(images.dtype))


def _centres(count: int, like: Tensor) -> Tensor:
    """Where pixels are along a side from -1 to 1."""
    return (2 * torch.arange(count, dtype=like.dtype, device=like.device) + 1) / count - 1
