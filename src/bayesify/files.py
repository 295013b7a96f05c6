"""Reading and writing files so that nothing is lost and nothing hostile is run.

Tensors are safetensors, the rest is JSON; nothing is unpickled. A file is written beside its place,
flushed to disk and then moved there, so that a reader sees the old one or the new one.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from bayesify.errors import CorruptFileError

LARGEST_JSON = 64 << 20
LARGEST_HEADER = 64 << 20


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Gives an empty file to write into, which takes the place of `path` at the end, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, atomically."""
    with replaced_file(path) as file:
        file.write(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Any = None) -> None:
    """Writes tensors, and anything that JSON can hold, into one safetensors file, atomically."""
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    header = None if metadata is None else {"bayesify": json.dumps(metadata)}
    write_bytes(path, save(whole, header))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Reads a safetensors file and the metadata written with it.

    Raises:
        CorruptFileError: If it is missing, truncated or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.") from error
    if size < 8 or header > min(size - 8, LARGEST_HEADER):
        raise CorruptFileError(
            f"{path} is truncated or not a safetensors file ({size} bytes). Save it again, or copy "
            f"it anew from where it came."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("bayesify")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, None if metadata is None else json.loads(metadata)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CorruptFileError(
            f"{path} is damaged: {error}. Save it again, or copy it anew from where it came."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, atomically."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        CorruptFileError: If the file is missing, too large or not JSON.
    """
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise CorruptFileError(f"{path} is too large to be one of bayesify's files.")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is damaged: it is not JSON ({error}).") from error


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which takes the place of `path` at the end, whole.

    If the work fails, what was at `path` stays. If the machine stops between the two moves, the old
    folder is found again by `recovered_folder`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    old = _set_aside(path)
    new.mkdir()
    try:
        yield new
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def recovered_folder(path: Path) -> Path:
    """`path`, or what was there before a replacement that never ended."""
    old = _set_aside(path)
    return old if old.exists() and not path.exists() else path


def matches(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Checks that a file holds just the tensors expected, all finite.

    Raises:
        CorruptFileError: If a name, shape or type is another one, or a number not finite.
    """
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            what = "lacks" if name not in tensors else "holds an unexpected"
            raise CorruptFileError(f"{path} {what} tensor {name!r}. Save it again.")
        found, wanted = tensors[name], expected[name]
        if (
            found.shape != wanted.shape
            or found.dtype.is_floating_point != wanted.is_floating_point()
        ):
            raise CorruptFileError(
                f"{path}: {name!r} is {found.dtype} {list(found.shape)} where {wanted.dtype} "
                f"{list(wanted.shape)} belongs. Save it again."
            )
        if found.is_floating_point() and not torch.isfinite(found).all():
            raise CorruptFileError(f"{path}: {name!r} holds NaN or infinite numbers.")


def fingerprint(network: nn.Module) -> str:
    """A hash of all of a network's tensors: names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in network.state_dict().items():
        digest.update(f"{name}/{tensor.dtype}/{list(tensor.shape)}/".encode())
        # Viewed as bytes: numpy knows no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _set_aside(path: Path) -> Path:
    return path.parent / f".{path.name}.replaced"
