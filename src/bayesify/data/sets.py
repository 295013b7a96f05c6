"""The shapes that data comes in: images in memory, image files, sentences, tables, slices."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from bayesify.errors import CorruptFileError, DataError, SettingError

if TYPE_CHECKING:
    from PIL.Image import Image

Normalisation: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation, one number a channel each, in units of [0, 1]."""

Items: TypeAlias = Dataset[Any]

VOID = 255
"""The label of pixels that belong to no class."""


def normalised(x: Tensor, normalise: Normalisation | None) -> Tensor:
    """Return (x - mean) / std for images `[B, C, H, W]`, channel by channel."""
    if normalise is None:
        return x
    mean, std = (torch.tensor(values, dtype=x.dtype).view(-1, 1, 1) for values in normalise)
    return (x - mean) / std


def check_normalisation(normalise: Normalisation | None, channels: int) -> None:
    """Stop unless there is one mean and one positive std a channel."""
    if normalise is None:
        return
    mean, std = normalise
    if not len(mean) == len(std) == channels or min(std) <= 0:
        raise SettingError(
            f"normalise={normalise!r} does not fit images of {channels} channels: give (mean, std) "
            "with one number a channel in each, every std above 0."
        )


class Images(Dataset[tuple[Tensor, ...]]):
    """Images kept as bytes, a quarter of the memory, and turned into floats when fetched.

    Args:
        pixels: Bytes `[N, C, H, W]`, or `[N, H, W]` if grey.
        labels: One a picture; without, items are `(x,)`.
        normalise: `(mean, std)` of each channel, in units of [0, 1].
        classes: Names of the labels.

    Example:
        >>> x, y = Images(torch.full((5, 8, 8), 255, dtype=torch.uint8), torch.arange(5))[3]
        >>> x.shape, x.max().item(), y.item()
        (torch.Size([1, 8, 8]), 1.0, 3)
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor | None = None,
        normalise: Normalisation | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels
        self.labels = labels
        self.normalise = normalise
        self.classes = classes
        check_normalisation(normalise, self.pixels.shape[1])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        """Fetch a whole batch at once, which DataLoader prefers where it finds this method."""
        x = normalised(self.pixels[indices].float() / 255, self.normalise)
        if self.labels is None:
            return [(image,) for image in x]
        return list(zip(x, self.labels[indices], strict=True))


class ImageFiles(Dataset[tuple[Tensor, ...]]):
    """RGB images that are decoded when fetched, from paths or from the bytes of files.

    Args:
        files: Paths, or the contents of files.
        labels: One a picture, or the file of a label map for each; without, items are `(x,)`.
        normalise: `(mean, std)` of each channel, in units of [0, 1].
        size: Cut each picture to a square around its centre and resize it to this side.
        classes: Names of the labels.
        void: The value in label maps that stands for no class; it becomes `VOID`.
    """

    def __init__(
        self,
        files: Sequence[Path | bytes],
        labels: Tensor | Sequence[bytes] | None = None,
        *,
        normalise: Normalisation | None = None,
        size: int | None = None,
        classes: Sequence[str] | None = None,
        void: int = VOID,
    ) -> None:
        check_normalisation(normalise, 3)
        if size is not None and size < 1:
            raise SettingError(f"size={size}: give the side of the images in pixels, 1 or more.")
        self.files = files
        self.labels = labels
        self.normalise = normalise
        self.size = size
        self.classes = classes
        self.void = void

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        from PIL import ImageOps

        image = open_image(self.files[index], "RGB")
        if self.size is not None:
            image = ImageOps.fit(image, (self.size, self.size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        x = normalised(pixels.float() / 255, self.normalise)
        if self.labels is None:
            return (x,)
        label = self.labels[index]
        return x, (label if isinstance(label, Tensor) else _label_map(label, self.void))

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        """Fetch a batch, whose pictures must be of one size."""
        items = [self[index] for index in indices]
        if len(sizes := {tuple(item[0].shape[1:]) for item in items}) > 1:
            raise DataError(
                f"the images have different sizes, such as {sorted(sizes)[:3]}: pass size=<pixels>."
            )
        return items


class Texts(Dataset[tuple[str, int]]):
    """Sentences with a class each; -1 is a sentence that belongs to none of `classes`."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], classes: Sequence[str]) -> None:
        self.texts = texts
        self.labels = labels
        self.classes = classes

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.texts[index], self.labels[index]


class Standardised(TensorDataset):
    """A regression table in standard units; `y * y_std + y_mean` is in the original ones."""

    def __init__(self, x: Tensor, y: Tensor, y_mean: float, y_std: float) -> None:
        super().__init__(x, y)
        self.y_mean = y_mean
        self.y_std = y_std


class Part(Subset[Any]):
    """A slice of a data set, which keeps the names of its classes."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the labels, if the whole has any."""
        return getattr(self.dataset, "classes", None)


def open_image(source: Path | bytes, mode: str) -> "Image":
    """Decode a picture, given as a path or as the contents of a file."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert(mode)
    # PIL raises SyntaxError for some broken PNG files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = "an image of the archive" if isinstance(source, bytes) else source
        raise CorruptFileError(f"{name} cannot be read ({error}): remove or replace it.") from error


def _label_map(png: bytes, void: int) -> Tensor:
    labels = torch.from_numpy(np.array(open_image(png, "L"), dtype=np.int64))
    return labels.masked_fill(labels == void, VOID)
