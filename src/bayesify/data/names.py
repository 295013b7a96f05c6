"""From a data set's name to the data set."""

import re
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import cast

from bayesify.data import public
from bayesify.data.digits import PARTS, read_digits, read_not_digits
from bayesify.data.files import SUFFIXES, read_csv, read_folder, read_npz
from bayesify.data.sets import ImageFiles, Items, Normalisation, Part
from bayesify.errors import DataError, SettingError

_Read = Callable[[str, Normalisation | None, int | None], Items]


@dataclass(frozen=True)
class _Source:
    """How a named data set is read, the parts it has, and what may be asked of it."""

    read: _Read
    parts: tuple[str, ...] = ()
    images: bool = True
    resizes: bool = False


def _not_digits(kind: str) -> _Source:
    return _Source(lambda _part, normalise, _size: read_not_digits(kind, normalise))


def _ood32(name: str) -> _Source:
    return _Source(lambda _part, normalise, _size: public.read_ood32(name, normalise))


def _uci(name: str) -> _Source:
    read = partial(public.read_uci, name)
    return _Source(lambda part, _normalise, _size: read(part), ("train/0", "test/0"), images=False)


BUILT_IN: dict[str, _Source] = {
    "digits": _Source(read_digits, tuple(PARTS)),
    "digits-rotated": _not_digits("rotated"),
    "digits-noise": _not_digits("noise"),
    "digits-photos": _not_digits("photos"),
    "cifar10": _Source(public.read_cifar10, ("train", "test")),
    "svhn": _ood32("svhn"),
    "cifar100": _ood32("cifar100"),
    "textures": _ood32("dtd10"),
    "fashion-mnist": _Source(public.read_fashion, ("train", "test")),
    "notmnist": _Source(public.read_notmnist),
    "imagenet-sample": _Source(public.read_imagenet, resizes=True),
    "faces": _Source(public.read_faces),
    "camvid": _Source(public.read_camvid, ("train", "val", "test")),
    "clinc150": _Source(
        lambda part, _normalise, _size: public.read_clinc150(part),
        ("train", "val", "test", "oos_train", "oos_val", "oos_test"),
        images=False,
    ),
} | {f"uci/{name}": _uci(name) for name in public.UCI_NAMES}


def load_data(
    spec: str, *, normalise: Normalisation | None = None, size: int | None = None
) -> Items:
    """Return the data set that `spec` names: pairs `(x, y)`, or `(x,)` where there are no labels.

    A spec may end in a slice, as in `cifar10:test[:2000]`.

    Args:
        spec: `file.npz` or `file.npz:part` (see `read_npz`), `file.csv` (see `read_csv`), an
            image, a folder of images (see `read_folder`), or a built-in name: `digits:train`,
            `:validation` and `:test`, `digits-rotated`, `digits-noise`, `digits-photos`; and,
            from the folder that BAYESIFY_DATA names, `cifar10:train` and `:test`, `svhn`,
            `cifar100`, `textures`, `fashion-mnist:train` and `:test`, `notmnist`,
            `imagenet-sample`, `faces`, `camvid:train`, `:val` and `:test`, `uci/yacht:train/0`
            (split 0), `clinc150:train`, `:val`, `:test`, `:oos_train`, `:oos_val` and `:oos_test`.
        normalise: `(mean, std)` of each channel, in units of [0, 1]; images only.
        size: Side to which image files are cut and resized.

    Raises:
        SettingError: The spec, or what is asked of this kind of data, is wrong.
        DataError: There is no such data, or it cannot be used.
        CorruptFileError: A file is damaged.

    Example:
        >>> x, y = load_data("digits:test[:100]")[0]
        >>> x.shape
        torch.Size([1, 8, 8])
    """
    name, rows = _split_slice(spec)
    data = _load(name, normalise, size)
    if rows is None:
        return data
    count = len(cast(Sized, data))
    indices = range(count)[rows]
    if not indices:
        raise DataError(f"{spec} is empty: {name} has {count} examples.")
    return Part(data, indices)


def load_inputs(
    specs: Iterable[str], *, normalise: Normalisation | None = None, size: int | None = None
) -> list[tuple[str, Items]]:
    """Return several data sets by name, image files that follow one another as one of them.

    These are for predictions: joined images have no labels.
    """
    loaded = [(spec, load_data(spec, normalise=normalise, size=size)) for spec in specs]
    found: list[tuple[str, Items]] = []
    for _, neighbours in groupby(loaded, lambda pair: isinstance(pair[1], ImageFiles)):
        group = list(neighbours)
        images = [data for _, data in group if isinstance(data, ImageFiles)]
        if len(images) > 1:
            files = [file for data in images for file in data.files]
            group = [(group[0][0], ImageFiles(files, normalise=normalise, size=size))]
        found += group
    return found


def _split_slice(spec: str) -> tuple[str, slice | None]:
    match = re.fullmatch(r"(.+)\[(-?\d*):(-?\d*)(?::(-?\d*))?\]", spec)
    if match is None:
        return spec, None
    try:
        rows = slice(*(int(bound) if bound else None for bound in match.groups()[1:]))
        range(0)[rows]
    except ValueError as error:
        raise SettingError(f"{spec}: not a slice ({error}); write for example [:2000].") from error
    return match[1], rows


def _load(name: str, normalise: Normalisation | None, size: int | None) -> Items:
    head, _, part = name.partition(":")
    if source := BUILT_IN.get(head):
        _check_wishes(name, source, part, normalise, size)
        return source.read(part, normalise, size)
    if name.endswith(".npz") or ".npz:" in name:
        file, _, part = name.rpartition(":") if ".npz:" in name else (name, "", "")
        if size is not None:
            raise SettingError(f"size={size}: {file} is not a folder of images; leave size out.")
        if not Path(file).is_file():
            raise DataError(f"{file}: there is no such file; check the path.")
        return read_npz(Path(file), part, normalise)
    path = Path(name)
    if path.is_dir():
        return read_folder(path, normalise, size)
    if path.suffix.lower() in (".csv", *SUFFIXES) and not path.is_file():
        raise DataError(f"{name}: there is no such file; check the path.")
    if path.suffix.lower() in SUFFIXES:
        return ImageFiles([path], normalise=normalise, size=size)
    if path.suffix.lower() == ".csv":
        if normalise is not None or size is not None:
            raise SettingError(f"normalise= and size= are for images, and {name} has none.")
        return read_csv(path)
    raise DataError(
        f"no data is called {name!r}: name an .npz or .csv file, an image or a folder of images "
        f"that exists, or one of {', '.join(BUILT_IN)}."
    )


def _check_wishes(
    name: str, source: _Source, part: str, normalise: Normalisation | None, size: int | None
) -> None:
    head = name.partition(":")[0]
    # Splits of the UCI tables are numbered, and checked where the file is read.
    if part not in (source.parts or ("",)) and not (part and head.startswith("uci/")):
        choices = [f"{head}:{known}" for known in source.parts] or [head]
        raise SettingError(f"{name!r}: write {' or '.join(choices)}.")
    if normalise is not None and not source.images:
        raise SettingError(f"normalise= is for images, and {head} has none: leave it out.")
    if size is not None and not source.resizes:
        raise SettingError(
            f"size={size}: {head} has one size already; leave size out, it is for image folders."
        )
