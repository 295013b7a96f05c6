"""What a result was made from, as a hash: the same hash, the same result.

Data in memory is hashed whole. Of data that is read when fetched, 2,000 examples evenly spaced
over the set are; of a loader that is no `DataLoader`, the first batches. Of functions it is their
source: what they refer to by name is not seen.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bayesify.validation import seeded

MOST_EXAMPLES = 2000
FIRST_BATCHES = 8


def digest(content: Any) -> str:
    """A hash of anything that JSON can hold.

    Example:
        >>> digest({"a": 1, "b": (2, 3)}) == digest({"b": [2, 3], "a": 1})
        True
    """
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identify_data(loader: Iterable[Any]) -> str:
    """A hash of what a loader yields, whatever order it shuffles it into.

    Example:
        >>> data = TensorDataset(torch.arange(10.0))
        >>> one, other = (DataLoader(data, 5, shuffle=shuffle) for shuffle in (True, True))
        >>> identify_data(one) == identify_data(other)
        True
    """
    found = hashlib.blake2b(digest_size=16)
    with seeded(0, loader), torch.no_grad():
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            sampler = type(loader.sampler).__name__
            _add(found, [loader.batch_size, loader.drop_last, sampler])
            _add(found, identify_function(loader.collate_fn))
            _add_data_set(found, loader.dataset)
        else:
            _add(found, len(loader) if isinstance(loader, Sized) else None)
            for batch in islice(loader, None if isinstance(loader, list) else FIRST_BATCHES):
                _add(found, batch)
    return found.hexdigest()


def identify_function(function: Any) -> str | None:
    """The name and source of a function; of a callable object, its class and what it prints."""
    if function is None or isinstance(function, str):
        return function
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return " ".join(str(identify_function(p) if callable(p) else p) for p in parts)
    code = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        source = ""
    own = "" if code is function or " at 0x" in repr(function) else repr(function)
    return f"{code.__module__}.{code.__qualname__}\n{source}{own}"


def identify_files(folder: Path) -> str:
    """A hash of the files of a folder."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            _add(found, [path.name, hashlib.file_digest(file, "blake2b").hexdigest()])
    return found.hexdigest()


def _add_data_set(found: Any, data: Any) -> None:
    from bayesify.data.sets import Images

    count = len(data)
    _add(found, count)
    if isinstance(data, TensorDataset):
        _add(found, data.tensors)
    elif isinstance(data, Images):
        _add(found, [data.pixels, data.labels, data.normalise])
    else:
        for place in np.linspace(0, count - 1, min(count, MOST_EXAMPLES)).astype(int).tolist():
            _add(found, data[place])


def _add(found: Any, value: Any) -> None:
    """Adds a value with its type, so that no two different ones come to the same."""
    if isinstance(value, Tensor):
        found.update(f"tensor {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found.update(f"array {value.dtype} {list(value.shape)}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        _add(found, [part for item in value.items() for part in item])
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)}".encode())
        for part in value:
            _add(found, part)
    else:
        found.update(f"{type(value).__name__} {value!r};".encode())
