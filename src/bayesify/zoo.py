"""Models by name, for the command line: a user's own factory, or one of the built-in networks."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.errors import (
    CorruptFileError,
    DataError,
    SettingError,
    UnsupportedNetworkError,
    WrongNetworkError,
)

ASSETS = Path(__file__).parent / "assets"

# Above any real header (a thousand tensors take some 100 kB), and far below what hurts to parse.
_LARGEST_HEADER = 16 * 2**20


def _conv(inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with x projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(
                _conv(inputs, outputs, size=1, stride=stride), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on features `[B, inputs, H, W]`."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.downsample(x) + self.bn2(self.conv2(y)))


class CifarResNet(nn.Module):
    """The ResNet of He et al. (2016) for 32x32 images: 6 n + 2 layers for n blocks a stage.

    Names follow torchvision, so that public CIFAR checkpoints load as they are.

    Args:
        blocks: Basic blocks in each of the three stages: 3 for ResNet-20, 9 for ResNet-56.
        classes: Number of logits.

    Example:
        >>> CifarResNet(blocks=3)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = _conv(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, stride=1)
        self.layer2 = self._stage(16, 32, blocks, stride=2)
        self.layer3 = self._stage(32, 64, blocks, stride=2)
        self.fc = nn.Linear(64, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, *, stride: int) -> nn.Sequential:
        rest = [BasicBlock(outputs, outputs) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]` of normalised images `[B, 3, H, W]`."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class DigitsNet(nn.Module):
    """A small convolutional network for the 8x8 grey digits of scikit-learn, values in [0, 1].

    Example:
        >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(1, 16), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = _conv(16, 32), nn.BatchNorm2d(32)
        self.conv3, self.bn3 = _conv(32, 32, stride=2), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, 10]` of images `[B, 1, 8, 8]`."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


@dataclass(frozen=True)
class _BuiltIn:
    """A network that has a name, the file of its weights, and how its images were normalised."""

    build: Callable[[], nn.Module]
    weights: Callable[[], Path]
    normalise: str | None = None


def _downloaded(name: str) -> Path:
    folder = os.environ.get("BAYESIFY_DATA")
    path = Path(folder or "$BAYESIFY_DATA") / "weights" / name
    if folder is None or not path.is_file():
        state = f"is {folder!r}" if folder else "is not set"
        raise DataError(
            f"{path} is missing (BAYESIFY_DATA {state}). It is the checkpoint of "
            "chenyaofo/pytorch-cifar-models as safetensors: put it there, or pass weights=<file>."
        )
    return path


BUILT_IN: dict[str, _BuiltIn] = {
    "digits": _BuiltIn(DigitsNet, lambda: ASSETS / "digits.safetensors"),
    "cifar10-resnet20": _BuiltIn(
        lambda: CifarResNet(3), lambda: _downloaded("cifar10_resnet20.safetensors"), "cifar10"
    ),
    "cifar10-resnet56": _BuiltIn(
        lambda: CifarResNet(9), lambda: _downloaded("cifar10_resnet56.safetensors"), "cifar10"
    ),
}


def usual_normalisation(spec: str) -> str | None:
    """How images of a built-in network were normalised; None if they were not, or for others."""
    return BUILT_IN[spec].normalise if spec in BUILT_IN else None


def load_model(spec: str, *, weights: str | Path | None = None) -> nn.Module:
    """Return the network that `spec` names, in eval mode.

    Args:
        spec: A built-in name (`digits`, `cifar10-resnet20`, `cifar10-resnet56`), or
            `path/to/file.py:factory` or `package.module:factory`, where the factory is a callable
            without arguments that returns an `nn.Module`, or such a module itself.
        weights: A .safetensors file whose names and shapes are the network's. Built-in networks
            come with weights, and a factory's network may have its own.

    Raises:
        SettingError: The spec or the file's name is wrong, or the user's code failed.
        UnsupportedNetworkError: The factory returned something other than an `nn.Module`.
        WrongNetworkError: The weights belong to another network.
        CorruptFileError: The weights file is damaged.
        DataError: The weights of a built-in network are not on this machine.

    Example:
        >>> load_model("digits")(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    if built_in := BUILT_IN.get(spec):
        weights = weights if weights is not None else built_in.weights()
        model = built_in.build()
    else:
        model = _call_factory(spec)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy a .safetensors file into `model`, after checking every name, shape and kind of number.

    A tensor that the network uses under several names may be in the file under any one of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    _check_weights_file(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(
            f"{path} is no whole safetensors file ({error}): copy or convert it again."
        ) from error
    _check_fit(model, tensors, path)
    model.load_state_dict(tensors, strict=False)


def _check_weights_file(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise SettingError(
            f"weights={str(path)!r}: only .safetensors files are read, because loading a pickle "
            "runs whatever code is in it. Convert a file that you trust with:\n"
            "    import torch, safetensors.torch\n"
            f'    safetensors.torch.save_file(torch.load("{path.name}", weights_only=True), '
            f'"{path.stem}.safetensors")'
        )
    if not path.is_file():
        raise SettingError(f"weights={str(path)!r}: there is no such file; check the path.")
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if not 2 <= header <= min(_LARGEST_HEADER, path.stat().st_size - 8):
        raise CorruptFileError(
            f"{path} is truncated or no safetensors file: copy or convert it again."
        )


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    own = model.state_dict(keep_vars=True)
    filled = {id(own[name]) for name in tensors if name in own}
    shared = own.keys() & tensors.keys()
    problems = {
        "lacks": [n for n in own if n not in tensors and id(own[n]) not in filled],
        "has unknown": [n for n in tensors if n not in own],
        "has another shape or kind of": [
            f"{n} ({_describe(tensors[n])}, the network has {_describe(own[n])})"
            for n in sorted(shared)
            if own[n].shape != tensors[n].shape
            or own[n].is_floating_point() != tensors[n].is_floating_point()
        ],
    }
    found = [f"{what} {_first(names)}" for what, names in problems.items() if names]
    if found:
        raise WrongNetworkError(
            f"{path} is not for this {type(model).__name__}: it {'; it '.join(found)}. "
            "Name the network that these weights were saved from."
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _first(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def _call_factory(spec: str) -> nn.Module:
    where, colon, attribute = spec.rpartition(":")
    if not (where and colon and attribute):
        raise SettingError(
            f"no model is called {spec!r}. Built in are {', '.join(sorted(BUILT_IN))}; for one of "
            "your own write path/to/file.py:factory or package.module:factory."
        )
    is_file = where.endswith(".py")
    with _importable(Path(where).parent if is_file else Path.cwd()):
        target: Any = _import_file(Path(where)) if is_file else _import_module(where)
        for name in attribute.split("."):
            target = _attribute(target, name, spec)
        if callable(target) and not isinstance(target, nn.Module):
            try:
                target = target()
            except Exception as error:
                raise SettingError(
                    f"{spec}: calling it without arguments raised {type(error).__name__}: {error}. "
                    "Write a function without arguments that returns your network."
                ) from error
    if not isinstance(target, nn.Module):
        raise UnsupportedNetworkError(
            f"{spec} gave a {type(target).__name__}, not a torch.nn.Module: return the network."
        )
    return target


def _attribute(owner: Any, name: str, spec: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        known = [
            n
            for n, v in getattr(owner, "__dict__", {}).items()
            if callable(v) and not n.startswith("_")
        ]
        raise SettingError(
            f"{spec}: there is no {name!r}; there is {_first(sorted(known), 8) or 'nothing'}."
        ) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let user code import its neighbours, as it can under `python file.py`."""
    before = list(sys.path)
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"{path}: there is no such file; check the path.")
    # A name of its own: a user's json.py must not replace the standard library's.
    name = f"bayesify_user_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise SettingError(f"{path} cannot be imported: name a Python file.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(what: str, error: BaseException) -> SettingError:
    return SettingError(
        f"{what} could not be imported: {type(error).__name__}: {error}. "
        "Check the name and import it in Python to see the whole traceback."
    )
