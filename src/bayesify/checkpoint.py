"""A fit's checkpoint: the state now, the best one and the optimizer's, in one safetensors file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.errors import SettingError
from bayesify.files import matches, read_tensors, write_tensors


class Checkpoint:
    """Where a fit that was stopped goes on from.

    Args:
        path: The file. It is written whole or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        signature: Mapping[str, Any],
        progress: Mapping[str, Any],
        now: Mapping[str, Tensor],
        best: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Writes it.

        Args:
            signature: What must be the same for the fit to go on.
            progress: How far it is.
            now: The tensors at work.
            best: Those that are kept so far.
            optimizer: What trains them, if anything does.
        """
        metadata = {"signature": signature, "progress": progress}
        write_tensors(self.path, _tensors(now, best, optimizer), metadata)

    def read(
        self,
        signature: Mapping[str, Any],
        now: Mapping[str, Tensor],
        best: dict[str, Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> dict[str, Any]:
        """Puts what was written into the tensors and the optimizer, and returns the progress.

        Raises:
            SettingError: If it is of another fit.
            CorruptFileError: If it cannot be read.
        """
        tensors, metadata = read_tensors(self.path)
        expected = json.loads(json.dumps(signature))  # JSON has no tuples
        if not isinstance(metadata, dict) or metadata.get("signature") != expected:
            raise SettingError(
                f"checkpoint {self.path} is of another fit: network, method, seed or number of "
                f"steps differ. Delete it to start anew, or name another file."
            )
        momenta: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("optimizer.")]:
            _, index, kind = name.split(".", 2)
            momenta.setdefault(int(index), {})[kind] = tensors.pop(name)
        matches(tensors, _tensors(now, best, None), self.path)
        with torch.no_grad():
            for name, value in now.items():
                value.copy_(tensors[f"now.{name}"])
        best.update({name: tensors[f"best.{name}"] for name in best})
        if optimizer is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": momenta})
        progress: dict[str, Any] = metadata["progress"]
        return progress


def _tensors(
    now: Mapping[str, Tensor], best: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """All tensors by the names they have in the file."""
    named = {f"now.{name}": value for name, value in now.items()}
    named |= {f"best.{name}": value for name, value in best.items()}
    momenta = {} if optimizer is None else optimizer.state_dict()["state"]
    for index, tensors in momenta.items():
        for name, value in tensors.items():
            named[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    return named
