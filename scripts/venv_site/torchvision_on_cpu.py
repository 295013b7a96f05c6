"""Let PyPI's torchvision, which is built against CUDA, be imported beside a CPU build of torch.

Its compiled operators cannot be loaded there, and `import torchvision` then stops at "operator
torchvision::nms does not exist". Declaring the two operators that it looks for is enough to import
it; calling them is still an error. `make` puts this file into its own virtual environments, next
to a .pth file that runs it; it is no part of the package. A sitecustomize.py would not do: Debian
and Ubuntu have one of their own, which hides any other.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# A torch.library.Library takes its definitions with it when it is collected.
_kept: list[Any] = []


class _BeforeTorchvision:
    """Wait for the first import of torchvision, so that starting Python imports no torch."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            _declare_operators(PathFinder.find_spec(name, path, target))
        return None


def _declare_operators(torchvision: ModuleSpec | None) -> None:
    if torchvision is None or torchvision.origin is None:
        return
    import torch

    # A torchvision whose operators do load defines them itself, and a second definition would fail.
    for extension in Path(torchvision.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(extension))
        except (ImportError, OSError):
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(operator + _SCHEMA)
    _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision)
