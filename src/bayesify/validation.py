"""Data that training does not see, by which `fit` decides what to keep."""

import contextlib
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from bayesify import augmentation
from bayesify.batches import Inputs, labelled
from bayesify.errors import BayesifyWarning, DataError
from bayesify.posterior import key

FRACTION = 0.1
MOST_EXAMPLES = 2000
MOST_BYTES = 512 << 20

Batches = list[tuple[Inputs, Any]]


@dataclass(frozen=True)
class HeldOut:
    """Examples in memory that judge a fit.

    Args:
        batches: Inputs and targets.
        originals: The same as they were, if these are training images under strong augmentation.
    """

    batches: Sequence[tuple[Inputs, Any]]
    originals: Sequence[tuple[Inputs, Any]] | None = None

    @property
    def augmented(self) -> bool:
        """Whether they are training images under strong augmentation."""
        return self.originals is not None

    def __len__(self) -> int:
        return sum(len(inputs) for inputs, _ in self.batches)

    def halves(self) -> tuple[Batches, Batches]:
        """Every other example, and the rest: both have all kinds, even of data that are sorted."""
        halves: tuple[Batches, Batches] = ([], [])
        seen = 0
        for inputs, target in self.batches:
            for side, half in enumerate(halves):
                rows = slice((side + seen) % 2, None, 2)
                if rows.start < len(inputs):
                    part = inputs[rows].map(Tensor.contiguous)
                    half.append((part, torch.as_tensor(target)[rows]))
            seen += len(inputs)
        return halves


@contextlib.contextmanager
def seeded(seed: int, loader: object = None) -> Iterator[None]:
    """Seeds the random numbers that augmentations and a loader use; afterwards all is as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    own = [getattr(loader, "generator", None)]
    own += [getattr(getattr(loader, "sampler", None), "generator", None)]
    states = [(g, g.get_state()) for g in own if isinstance(g, torch.Generator)]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for generator, _ in states:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in states:
                generator.set_state(state)


def collect(loader: Iterable[Any], seed: int, *, most: int = MOST_EXAMPLES) -> HeldOut:
    """Takes a validation loader's first examples into memory, as they are."""
    with seeded(key("validation", seed)):
        return HeldOut(list(_first(labelled(loader), most)))


def hold_out(loader: Iterable[Any], seed: int) -> tuple[Iterable[Any], HeldOut]:
    """Splits a tenth off a training loader, at most 2,000 examples.

    Images are judged under strong augmentation: a network has learned its training images by heart,
    so that as they are they would always speak for less uncertainty.

    Returns:
        A loader without the tenth, and the tenth.
    """
    rest, held = _split(loader, seed)
    with seeded(key("validation", seed)):
        batches = list(_first(labelled(held), MOST_EXAMPLES))
        changed = [(_strong(inputs), target) for inputs, target in batches]
    augmented = any(new is not old for (new, _), (old, _) in zip(changed, batches, strict=True))
    if not augmented:
        warnings.warn(
            "there is no validation loader, and these inputs are not images that could be "
            "augmented: examples split off the training data decide what is kept. If the network "
            "was trained on them they flatter it; pass validation= with data it has not seen.",
            BayesifyWarning,
            stacklevel=3,
        )
    return rest, HeldOut(changed, batches if augmented else None)


def _split(loader: Iterable[Any], seed: int) -> tuple[Iterable[Any], Iterable[Any]]:
    if _can_be_rebuilt(loader):
        return _split_dataset(loader, seed)  # type: ignore[arg-type]
    try:
        count = len(loader)  # type: ignore[arg-type]
    except TypeError:
        count = 10
    if count < 2:
        raise DataError(
            "the loader has a single batch and no part can be held out of it to judge the fit. "
            "Pass validation=, or smaller batches."
        )
    held = max(1, round(FRACTION * count))
    return Skipping(loader, held), _Start(loader, held)


def _can_be_rebuilt(loader: Iterable[Any]) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and isinstance(loader.sampler, RandomSampler | SequentialSampler)
        and loader.batch_size is not None
    )


def _split_dataset(loader: DataLoader[Any], seed: int) -> tuple[Iterable[Any], Iterable[Any]]:
    count = len(loader.dataset)  # type: ignore[arg-type]
    if count < 2:
        raise DataError(
            f"the data set has {count} examples and none can be held out to judge the fit. Check "
            f"that it is the right one, or pass validation=."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(key("split", seed)))
    held = min(MOST_EXAMPLES, max(1, round(FRACTION * count)))

    def part(rows: Tensor, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            Subset(loader.dataset, rows.sort().values.tolist()),
            batch_size=loader.batch_size,
            shuffle=shuffle,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last and shuffle,
            worker_init_fn=loader.worker_init_fn,
        )

    shuffle = isinstance(loader.sampler, RandomSampler)
    return part(order[held:], shuffle=shuffle), part(order[:held], shuffle=False)


class Skipping:
    """A loader without its first batches, for loaders whose data set cannot be split."""

    def __init__(self, loader: Iterable[Any], skip: int) -> None:
        self.loader = loader
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.skip, None)

    def __len__(self) -> int:
        return len(self.loader) - self.skip  # type: ignore[arg-type]


class _Start:
    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader = loader
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.count)


def _first(batches: Iterator[tuple[Inputs, Any]], most: int) -> Iterator[tuple[Inputs, Any]]:
    examples = size = 0
    for inputs, target in batches:
        inputs.require_finite()
        yield inputs, target
        examples += len(inputs)
        size += sum(tensor.nbytes for tensor in inputs.tensors())
        if examples >= most or size >= MOST_BYTES:
            return


def _strong(inputs: Inputs) -> Inputs:
    """Images under strong augmentation; anything else as it is."""
    images = [t for t in inputs.tensors() if t.is_floating_point()]
    if len(images) != 1 or images[0].ndim != 4 or min(images[0].shape[2:]) < 4:
        return inputs
    return inputs.map(lambda t: augmentation.strong(t) if t is images[0] else t)
