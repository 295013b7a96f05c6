"""Reading users' own data: .npz and .csv files, images and folders of images."""

import csv
import math
import zipfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bayesify.batches import TARGET_KEYS
from bayesify.data.sets import (
    ImageFiles,
    Images,
    Items,
    Normalisation,
    check_normalisation,
    normalised,
)
from bayesify.errors import CorruptFileError, DataError, SettingError

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}

# What numpy and zipfile raise for one damaged byte or another.
_DAMAGED = (
    OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return every array of an .npz file; one that would need pickle is an error."""
    try:
        # numpy leaves a damaged file open if it opens it itself.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (*_DAMAGED, AttributeError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is damaged, or no .npz file of plain arrays ({error}): write it again with "
            "numpy.savez(path, x=..., y=...)."
        ) from error


def read_npz(path: Path, part: str, normalise: Normalisation | None) -> Items:
    """Read arrays `x` and, if there is one, `y`, or `x_<part>` and `y_<part>`.

    Bytes `[N, H, W]` or `[N, H, W, C]` are images, and become floats `[N, C, H, W]` in [0, 1] as
    they are fetched. Anything else becomes float32 as it is. `images` and `labels` are understood
    too.
    """
    arrays = read_arrays(path)
    ending = f"_{part}" if part else ""
    pairs = ((f"x{ending}", f"y{ending}"), (f"images{ending}", f"labels{ending}"))
    x_name, y_name = next((pair for pair in pairs if pair[0] in arrays), ("", ""))
    if not x_name:
        raise DataError(
            f"{path} has no array {pairs[0][0]!r} or {pairs[1][0]!r}, only {sorted(arrays)}: "
            "rename one, or name a part, as in file.npz:train for x_train and y_train."
        )
    x = arrays[x_name]
    if x.ndim == 0:
        raise DataError(f"{path}: {x_name!r} is one number: the first axis must be the examples.")
    y = _labels(arrays[y_name], len(x), path) if y_name in arrays else None
    if len(x) == 0:
        raise DataError(f"{path}: {x_name!r} is empty: there must be at least one example.")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return Images(_channels_first(x, path), y, normalise)
    values = _floats(x, x_name, path)
    if normalise is not None and values.ndim != 4:
        raise SettingError(f"normalise= is for images, and {path} has x of {list(values.shape)}.")
    check_normalisation(normalise, values.shape[1] if values.ndim > 1 else 1)
    values = normalised(values, normalise)
    return TensorDataset(values) if y is None else TensorDataset(values, y)


def _channels_first(x: np.ndarray[Any, Any], path: Path) -> Tensor:
    if x.ndim == 4 and x.shape[3] not in (1, 3):
        raise DataError(
            f"{path}: byte images of shape {list(x.shape)}: [N, H, W], [N, H, W, 1] or "
            "[N, H, W, 3] is wanted; transpose them."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(x))
    return pixels.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else pixels


def _floats(x: np.ndarray[Any, Any], name: str, path: Path) -> Tensor:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{path}: {name!r} holds {x.dtype}, not numbers: convert it to float32.")
    values = torch.from_numpy(x.astype(np.float32))
    if not values.isfinite().all():
        raise DataError(f"{path}: {name!r} has values that are NaN or infinite: clean it first.")
    return values


def _labels(y: np.ndarray[Any, Any], count: int, path: Path) -> Tensor:
    if y.ndim == 0 or len(y) != count:
        raise DataError(f"{path}: {count} examples and labels of shape {list(y.shape)}: one each.")
    if y.dtype.kind in "iub":
        return torch.from_numpy(y.astype(np.int64))
    return _floats(y, "y", path)


def read_csv(path: Path) -> Items:
    """Read a table of numbers: a row an example, a column a number the network takes.

    If a heading is `y`, `label` or `target`, that column is the target: classes if all its numbers
    are written as whole ones. Without headings all columns are inputs.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _table(csv.reader(file), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CorruptFileError(
            f"{path} cannot be read as a CSV file ({error}): write it again, in UTF-8."
        ) from error


def _table(lines: Any, path: Path) -> Items:
    place, width, whole = None, 0, True
    inputs, targets = array("f"), array("d")
    for line in lines:
        if not line:
            continue
        if not width:
            width = len(line)
            if any(cell.strip() and not _is_number(cell) for cell in line):
                place = _target_column(line, path)
                continue
        row = _numbers(line, width, f"{path}, line {lines.line_num}")
        if place is not None:
            whole &= line[place].strip().lstrip("+-").isdecimal()
            targets.append(row.pop(place))
        inputs.extend(row)
    columns = width - (place is not None)
    if not inputs:
        raise DataError(f"{path} has no numbers to predict from: a line an example is wanted.")
    x = _floats(np.frombuffer(inputs, np.float32).reshape(-1, columns), "x", path)
    if place is None:
        return TensorDataset(x)
    y = torch.tensor(targets, dtype=torch.float64)
    return TensorDataset(x, y.long() if whole else y.float())


def _numbers(line: list[str], width: int, where: str) -> list[float]:
    if len(line) != width:
        raise DataError(
            f"{where}: {len(line)} columns where the first line has {width}: write as many."
        )
    try:
        row = [float(cell) for cell in line]
    except ValueError as error:
        raise DataError(f"{where}: {error}; write a number, or drop the line.") from None
    if not all(map(math.isfinite, row)):
        raise DataError(f"{where}: NaN or infinite numbers: clean or drop the line.")
    return row


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _target_column(headings: list[str], path: Path) -> int | None:
    found = [i for i, heading in enumerate(headings) if heading.strip().lower() in TARGET_KEYS]
    if len(found) > 1:
        raise DataError(
            f"{path}: the columns {[headings[i] for i in found]} would all be the target: keep one."
        )
    return found[0] if found else None


def read_folder(folder: Path, normalise: Normalisation | None, size: int | None) -> Items:
    """Read `folder/<class>/*.png` with labels, or `folder/*.png` without; jpg, webp and bmp too.

    Files are decoded as they are fetched. Classes are the folders' names, sorted.
    """
    try:
        flat = _images_of(folder)
        classes = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
        )
        by_class = [_images_of(folder / name) for name in classes]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error}): check its permissions.") from error
    if flat and not classes:
        return ImageFiles(flat, normalise=normalise, size=size)
    if flat or not any(by_class):
        found = "images beside folders" if flat else "no images"
        raise DataError(
            f"{folder} has {found}: put images ({', '.join(sorted(SUFFIXES))}) into one folder a "
            "class, or all into this one if there are no labels."
        )
    if empty := [name for name, files in zip(classes, by_class, strict=True) if not files]:
        raise DataError(f"{folder}: no images in {empty}: remove these folders or fill them.")
    labels = torch.tensor([label for label, files in enumerate(by_class) for _ in files])
    files = [file for of_class in by_class for file in of_class]
    return ImageFiles(files, labels, normalise=normalise, size=size, classes=classes)


def _images_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
