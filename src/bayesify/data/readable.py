"""Going through data past images that cannot be read."""

import warnings
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, cast

from torch.utils.data import default_collate

from bayesify.data.sets import ImageFiles, Items, Part
from bayesify.errors import BayesifyWarning, CorruptFileError, DataError


def readable(data: Items) -> Items:
    """The part of a data set that can be read; a warning counts and lists what is left out.

    Every image file is decoded once, so that training does not stop at one in the middle. Data in
    memory is as it was.

    Raises:
        DataError: If nothing can be read.
    """
    whole: Any = data
    while isinstance(whole, Part):
        whole = whole.dataset
    if not isinstance(whole, ImageFiles):
        return data
    batches, rows = Readable(data, 1), range(len(cast(Sized, data)))
    bad = batches.unreadable(rows)
    if not bad:
        return data
    batches.tell(bad, len(rows))
    return Part(data, [row for row in rows if row not in bad])


class Readable:
    """Batches of a data set, without the images that cannot be read.

    The first time that it has been gone through, a warning counts and lists what was left out.

    Args:
        data: A data set.
        batch_size: Examples at a time.

    Raises:
        DataError: When it has been gone through, if nothing could be read.
    """

    def __init__(self, data: Items, batch_size: int) -> None:
        self.data: Any = data
        self.batch_size = batch_size
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[list[int], Any]]:
        """Each batch with the places that its examples have in the data."""
        count = len(cast(Sized, self.data))
        bad: dict[int, CorruptFileError] = {}
        for start in range(0, count, self.batch_size):
            rows = list(range(start, min(start + self.batch_size, count)))
            try:
                items = self._fetch(rows)
            except CorruptFileError:
                bad |= self.unreadable(rows)
                rows = [row for row in rows if row not in bad]
                items = self._fetch(rows) if rows else []
            if items:
                yield rows, default_collate(items)
        if bad:
            self.tell(bad, count)

    def name(self, row: int) -> str | None:
        """The path of an example, if it is a file."""
        data = self.data
        while isinstance(data, Part):
            row, data = data.indices[row], data.dataset
        if isinstance(data, ImageFiles) and isinstance(file := data.files[row], Path):
            # A name that is not UTF-8 could not be written down.
            return str(file).encode(errors="backslashreplace").decode()
        return None

    def unreadable(self, rows: Iterable[int]) -> dict[int, CorruptFileError]:
        """Which of these places hold an image that cannot be read, and why."""
        bad = {}
        for row in rows:
            try:
                self.data[row]
            except CorruptFileError as error:
                bad[row] = error
        return bad

    def tell(self, bad: dict[int, CorruptFileError], count: int) -> None:
        """Warns, once, of what is left out of `count` images; raises if that is all of them."""
        if len(bad) == count:
            raise DataError(f"none of {count} images can be read. The first: {bad[0]}")
        if not self._warned:
            self._warned = True
            names = ", ".join(self.name(row) or f"number {row}" for row in bad)
            warnings.warn(
                f"{len(bad)} of {count} images cannot be read and are left out: {names}",
                BayesifyWarning,
                stacklevel=3,
            )

    def _fetch(self, rows: list[int]) -> list[Any]:
        if hasattr(self.data, "__getitems__"):
            return list(self.data.__getitems__(rows))
        return [self.data[row] for row in rows]
