"""scikit-learn's 8x8 digits, and things of that size that are no digits: all that a demo needs."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bayesify.data.sets import Items, Normalisation, check_normalisation, normalised

PARTS = {"train": slice(0, 810), "validation": slice(810, 1080), "test": slice(1080, 1797)}
"""45 % to train on, 15 % to choose settings by, 40 % to judge by."""


def split_digits(part: str) -> tuple[Tensor, Tensor]:
    """Return images `[N, 1, 8, 8]` in [0, 1] and labels of one part; always the same ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # RandomState's stream is frozen for ever; those of newer generators may change.
    order = np.random.RandomState(0).permutation(len(digits.target))[PARTS[part]]
    images = torch.from_numpy(digits.images[order] / 16).float()
    return images.unsqueeze(1), torch.from_numpy(digits.target[order].astype(np.int64))


def read_digits(part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read `digits:train`, `digits:validation` or `digits:test`."""
    x, y = split_digits(part)
    check_normalisation(normalise, 1)
    return TensorDataset(normalised(x, normalise), y)


def read_not_digits(kind: str, normalise: Normalisation | None) -> Items:
    """Read what a digits network never saw, without labels: `rotated`, `noise` or `photos`."""
    images = {"rotated": _rotated, "noise": _noise, "photos": _photos}[kind]()
    check_normalisation(normalise, 1)
    return TensorDataset(normalised(images, normalise))


def _rotated() -> Tensor:
    """Test digits, a quarter turn to the left, but for 0, which would still be one."""
    x, y = split_digits("test")
    return x[y != 0].rot90(1, dims=(2, 3)).contiguous()


def _noise(count: int = 500) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def _photos() -> Tensor:
    """Grey tiles of scikit-learn's two photographs, reduced so that a tile has something on it."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    tiles = []
    for photo in load_sample_images().images:
        grey = np.array(Image.fromarray(photo).convert("L").reduce(4))
        rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
        grid = torch.from_numpy(grey[: rows * 8, : columns * 8]).float() / 255
        tiles.append(grid.view(rows, 8, columns, 8).transpose(1, 2).reshape(-1, 1, 8, 8))
    return torch.cat(tiles)
