"""Features: a trunk's outputs of all examples of a fit, computed once and kept in a file.

Where only late layers train and inputs do not change, nothing before them has to run again: a fit
reads the trunk's outputs of an example instead of the example. They are the same in every epoch
only if the data set yields the same item each time, which is tried, not proved.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from bayesify.batches import Inputs, labelled, split_batch
from bayesify.gradients import Gradients
from bayesify.posterior import key
from bayesify.trunk import is_plain
from bayesify.validation import HeldOut, seeded

# Items of the data set that are read twice, to see whether they change.
TRIED = 32
SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class NoFeaturesError(Exception):
    """Why features are not kept: what is said of it to the user."""


class Store:
    """Rows of tensors in a file that has no name, mapped into memory.

    Nobody has to remove it: it is gone when it is closed, or its process ends in whatever way.

    Args:
        like: What the rows are like: tensors with a row or more.
        folder: Where the file is; None for the system's folder for such files.
    """

    def __init__(self, like: Sequence[Tensor], folder: Path | None) -> None:
        self._kinds = [(t.dtype, t.shape[1:], t[:1].nbytes) for t in like]
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        self._rows: Tensor | None = None
        self.row_bytes = sum(size for *_, size in self._kinds)

    def append(self, tensors: Sequence[Tensor]) -> None:
        """Writes rows behind those that are there.

        Raises:
            NoFeaturesError: If they are not of the same kind.
            OSError: If the disk is full, for instance.
        """
        if [(t.dtype, t.shape[1:]) for t in tensors] != [kind[:2] for kind in self._kinds]:
            raise NoFeaturesError("targets are of different shapes")
        parts = [t.detach().cpu().contiguous().view(len(t), -1).view(torch.uint8) for t in tensors]
        self._file.write(torch.cat(parts, 1).numpy().data)

    def read(self, rows: Tensor) -> list[Tensor]:
        """Rows, in memory of their own."""
        if self._rows is None:
            self._file.flush()
            mapped = np.memmap(self._file, np.uint8, "r+").reshape(-1, self.row_bytes)
            self._rows = torch.from_numpy(mapped)
        parts = self._rows[rows].split([size for *_, size in self._kinds], 1)
        return [
            part.contiguous().view(dtype).view(len(rows), *shape)
            for part, (dtype, shape, _) in zip(parts, self._kinds, strict=True)
        ]

    def close(self) -> None:
        """Gives the file back."""
        self._rows = None
        self._file.close()


class Features:
    """A loader of features and targets, in the order in which another loader yields examples.

    Args:
        gradients: Of the fit; they say how the network is split.
        loader: Of the training examples.
        held: Held-out examples.
        folder: Where the file is; None for the system's folder for such files.
        limit: How many bytes features may take.
        seed: Of the fit.
        show: Shows a progress bar.

    Attributes:
        bytes: What features take.
        held: The held-out examples' features, read when they are asked for.
        rest: Runs the network behind the features.

    Raises:
        NoFeaturesError: If they cannot be kept, are too many, or would not be the same each time.
    """

    def __init__(
        self,
        gradients: Gradients,
        loader: Any,
        held: HeldOut,
        *,
        folder: Path | None,
        limit: int,
        seed: int,
        show: bool,
    ) -> None:
        self.sampler, self.generator = _order(loader)
        with _or_none("some examples could not be read"):
            inputs, target = _tried(loader, seed)
        found = gradients.split(inputs.to(gradients.model.device))
        if found is None:
            raise NoFeaturesError(
                "less than half of the network stands before what trains, or it cannot be parted"
            )
        self.rest = found.rest
        self._split, self._kind = found, inputs[:1].describe()
        self._device = gradients.model.device
        with _or_none("some examples have no features"):
            few = [*self._features(inputs), target]
        size = len(loader.dataset) * sum(t[:1].nbytes for t in few)
        size += len(held) * sum(t[:1].nbytes for t in few[:-1])
        if size > limit:
            raise NoFeaturesError(
                f"features would take {size / 2**30:.2f} GiB, more than cache_bytes={limit}"
            )
        self.bytes = size
        with _or_none("there can be no file"):
            self._train, self._held = Store(few, folder), Store(few[:-1], folder)
        try:
            with _or_none("not every example has features"), seeded(key("features", seed)):
                self._fill(loader, held, show=show)
        except BaseException:
            self.close()
            raise
        self._rows: DataLoader[Any] = DataLoader(
            range(len(loader.dataset)),  # type: ignore[arg-type]
            batch_sampler=loader.batch_sampler,
            generator=loader.generator,
            collate_fn=torch.tensor,
        )
        self.held = HeldOut(_Batches(self._held, held.batches))

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches of features and targets."""
        for rows in self._rows:
            *features, target = self._train.read(rows)
            yield Inputs(tuple(features), {}), target

    def __len__(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        """Gives the files back."""
        self._train.close()
        self._held.close()

    def _features(self, inputs: Inputs) -> tuple[Tensor, ...]:
        if inputs[:1].describe() != self._kind or not is_plain(inputs):
            raise NoFeaturesError("examples are of different shapes")
        features = self._split.features(inputs.to(self._device))
        features.require_finite()
        return features.args

    def _fill(self, loader: DataLoader[Any], held: HeldOut, *, show: bool) -> None:
        from tqdm.auto import tqdm

        in_order = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
        )
        bar = tqdm(total=len(in_order), disable=not show, desc="features", unit="batch")
        for inputs, target in labelled(in_order):
            inputs.require_finite()
            self._train.append([*self._features(inputs), torch.as_tensor(target)])
            bar.update()
        bar.close()
        for inputs, _ in held.batches:
            self._held.append(self._features(inputs))


class _Batches(Sequence[tuple[Inputs, Any]]):
    """Held-out batches whose features are in a file."""

    def __init__(self, store: Store, batches: Sequence[tuple[Inputs, Any]]) -> None:
        self._store = store
        self._targets = [target for _, target in batches]
        ends = torch.tensor([len(inputs) for inputs, _ in batches]).cumsum(0).tolist()
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))

    def __getitem__(self, index: Any) -> Any:
        features = self._store.read(torch.arange(*self._bounds[index]))
        return Inputs(tuple(features), {}), self._targets[index]

    def __len__(self) -> int:
        return len(self._targets)


@contextlib.contextmanager
def _or_none(what: str) -> Iterator[None]:
    """Whatever goes wrong means no features; if it matters, the fit without them will raise it."""
    try:
        yield
    except NoFeaturesError:
        raise
    except Exception as error:
        raise NoFeaturesError(f"{what}: {error}") from error


def _order(loader: Any) -> tuple[Any, Any]:
    """Sampler and generator of a loader, if its order can be had without its items."""
    if (
        type(loader) is not DataLoader
        or isinstance(loader.dataset, IterableDataset)
        or type(loader.batch_sampler) is not BatchSampler
        or type(loader.sampler) not in SAMPLERS
        or loader.persistent_workers  # whose order is another one
        or not all(map(_is_row, getattr(loader.sampler, "indices", ())))
    ):
        raise NoFeaturesError("the loader is no plain DataLoader of a data set with indices")
    return loader.sampler, loader.generator


def _is_row(index: object) -> bool:
    return isinstance(index, Integral) and int(index) >= 0


def _tried(loader: DataLoader[Any], seed: int) -> tuple[Inputs, Tensor]:
    """Some examples, if each is the same when read again and alone, and nothing random is drawn."""
    count = len(loader.dataset)  # type: ignore[arg-type]
    rows = sorted({i * count // TRIED for i in range(TRIED)})
    with seeded(key("read", seed)):
        before = _random_states()
        inputs, target = _read(loader, rows)
        drew = _random_states() != before
    with seeded(key("read again", seed)):
        again = [_read(loader, [row]) for row in rows]
    alone = zip(*([*i.tensors(), t] for i, t in again), strict=True)
    same = map(torch.equal, map(torch.cat, alone), [*inputs.tensors(), target])
    if drew or not all(same):
        raise NoFeaturesError("the data set's items are random, or change with their batch")
    return inputs, target


def _read(loader: DataLoader[Any], rows: Sequence[int]) -> tuple[Inputs, Tensor]:
    """A batch, as the loader would make it."""
    items = Subset(loader.dataset, rows).__getitems__([*range(len(rows))])
    inputs, target = split_batch(loader.collate_fn(items))
    if target is None or not is_plain(inputs):
        raise NoFeaturesError("inputs are not tensors with a row for each example")
    return inputs, torch.as_tensor(target)


def _random_states() -> tuple[object, ...]:
    numpy = np.random.get_state()
    state = [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy]
    return (torch.get_rng_state().numpy().tobytes(), state, random.getstate())
