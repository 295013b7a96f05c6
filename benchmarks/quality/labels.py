"""Data. Labels of test images come from one function, which logs who asked for them."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bayesify.data import CIFAR10_NORMALISATION, load_data
from benchmarks.quality.provenance import commit, now
from benchmarks.quality.results import RESULTS
from benchmarks.quality.settings import BATCH

# Committed, and shared by quick runs: whoever looks at test labels is in it.
LOG = RESULTS / "quality" / "test_labels.log"
TOGETHER = 250


def test_labels(split: str, who: str) -> Tensor:
    """The labels of a split, and a line in the log: time, who, commit, images, split.

    Args:
        split: A name of `load_data`, or cifar10h with a slice: what share of people chose which
            class for each test image of CIFAR-10.
        who: The unit.
    """
    head, _, rows = split.partition("[")
    labels = _people(rows.rstrip("]")) if head == "cifar10h" else _columns(split)[1]
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("a") as file:
        file.write(f"{now()} {who} {commit()} {len(labels)} images {split}\n")
    return labels


def test_data(split: str, who: str) -> TensorDataset:
    """Test images with their labels."""
    return TensorDataset(images(split), test_labels(split, who))


def images(split: str) -> Tensor:
    """Images alone, normalised as the networks want them."""
    return _columns(split)[0]


def training_data(split: str) -> Any:
    """Training images with their labels.

    Raises:
        ValueError: If they are test images.
    """
    if split.startswith("cifar10:test"):
        raise ValueError(f"{split} is no training data: ask test_data, which logs who asked.")
    return load_data(split, normalise=CIFAR10_NORMALISATION)


def batches(data: Any, batch: int = TOGETHER, *, shuffle: bool = False) -> DataLoader[Any]:
    """A loader; tensors alone are images without labels."""
    data = TensorDataset(data) if isinstance(data, Tensor) else data
    return DataLoader(data, batch_size=batch, shuffle=shuffle)


def training_batches(split: str) -> DataLoader[Any]:
    return batches(training_data(split), BATCH, shuffle=True)


@lru_cache(maxsize=4)  # of the units that follow, most ask for the same
def _columns(split: str) -> tuple[Tensor, Tensor]:
    data = load_data(split, normalise=CIFAR10_NORMALISATION)
    x, y = zip(*DataLoader(data, batch_size=1000), strict=True)
    return torch.cat(x), torch.cat(y)


def _people(rows: str) -> Tensor:
    with np.load(Path(os.environ["BAYESIFY_DATA"]) / "cifar10" / "labels.npz") as arrays:
        shares = torch.from_numpy(arrays["cifar10h_probs"]).float()
    bounds = re.fullmatch(r"(\d*):(\d*)", rows or ":")
    if bounds is None:
        raise ValueError(f"cifar10h[{rows}]: write a slice, for example [:1000].")
    return shares[slice(*(int(bound) if bound else None for bound in bounds.groups()))]
