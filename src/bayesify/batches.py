"""What a batch is: inputs and target, as loaders and users hand them over.

A network is called with positional and keyword arguments. A tensor is one argument, a tuple
several, a dict (Hugging Face) keywords. A loader's tuple ends with its target; its dict has it
under one of `TARGET_KEYS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.errors import DataError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the network; tensors whose first size is `size` are batched."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]

    def __len__(self) -> int:
        for tensor in self.tensors():
            if tensor.ndim > 0:
                return tensor.shape[0]
        raise DataError(
            f"a batch must hold a tensor with a leading batch dimension, and has only "
            f"{self.describe()}."
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Applies a function to every tensor."""

        def apply(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else value

        return Inputs(
            tuple(apply(value) for value in self.args),
            {name: apply(value) for name, value in self.kwargs.items()},
        )

    def map_batched(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Applies a function to every tensor that has the batch dimension."""
        size = len(self)
        return self.map(lambda t: function(t) if t.ndim > 0 and t.shape[0] == size else t)

    def to(self, device: torch.device) -> "Inputs":
        """Moves every tensor."""
        return self.map(lambda t: t.to(device, non_blocking=True))

    def __getitem__(self, rows: slice) -> "Inputs":
        return self.map_batched(lambda t: t[rows])

    def split(self, size: int) -> "Iterator[Inputs]":
        """Consecutive parts of at most `size` examples."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def require_finite(self) -> None:
        """Raises if a number among the inputs is a NaN or infinite."""
        for name, value in (*enumerate(self.args), *self.kwargs.items()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
                bad = ~torch.isfinite(value.flatten(1) if value.ndim > 1 else value[:, None])
                if bad.any():
                    rows = bad.any(1).nonzero().flatten()
                    raise DataError(
                        f"input {name!r} holds NaN or infinite numbers in {len(rows)} of "
                        f"{len(value)} examples, the first at position {int(rows[0])}. Clean or "
                        f"drop these examples, or check the normalisation."
                    )

    def describe(self) -> str:
        """Shapes and types in a line, for errors."""

        def show(value: Any) -> str:
            if isinstance(value, Tensor):
                return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            return type(value).__name__

        parts = [show(value) for value in self.args]
        parts += [f"{name}={show(value)}" for name, value in self.kwargs.items()]
        return "(" + ", ".join(parts) + ")"


def as_inputs(x: Any) -> Inputs:
    """Reads what a user hands over: a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(x, Inputs):
        return x
    if isinstance(x, Tensor):
        inputs = Inputs((x,), {})
    elif isinstance(x, Mapping):
        inputs = Inputs((), {name: value for name, value in x.items() if name not in TARGET_KEYS})
    elif isinstance(x, tuple | list) and any(isinstance(item, Tensor) for item in x):
        inputs = Inputs(tuple(x), {})
    else:
        raise DataError(
            f"inputs of type {type(x).__name__} are not understood: pass a tensor, a tuple of "
            f"tensors, a dict of tensors or a DataLoader of these."
        )
    if len(inputs) == 0:
        raise DataError(f"the batch is empty: {inputs.describe()}. Pass at least one example.")
    return inputs


def is_loader(x: Any) -> bool:
    """Whether something yields batches, rather than being one."""
    if isinstance(x, Tensor | Mapping | tuple | str | Inputs) or not isinstance(x, Iterable):
        return False
    return not (isinstance(x, list) and any(isinstance(item, Tensor) for item in x))


def split_batch(batch: Any) -> tuple[Inputs, Any]:
    """Separates a loader's batch into inputs and target; the target is None where there is none."""
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in TARGET_KEYS if name in batch), None)
        return as_inputs(batch), target
    if isinstance(batch, tuple | list) and len(batch) > 1:
        *parts, target = batch
        if len(parts) == 1:
            return as_inputs(parts[0]), target
        return as_inputs(tuple(parts)), target
    if isinstance(batch, tuple | list) and len(batch) == 1:
        return as_inputs(batch[0]), None
    return as_inputs(batch), None


def labelled(loader: Iterable[Any]) -> Iterator[tuple[Inputs, Any]]:
    """Goes through a loader's batches, all of which must have a target and one at least be there.

    Raises:
        DataError: If the loader is empty or a batch has no target.
    """
    empty = True
    for batch in loader:
        empty = False
        inputs, target = split_batch(batch)
        if target is None:
            raise DataError(
                f"a batch has no target: {inputs.describe()}. Yield (inputs, target), or a dict "
                f"with one of {', '.join(TARGET_KEYS)}."
            )
        yield inputs, target
    if empty:
        raise DataError(
            "the loader is empty: it yields no batch. Check the data set's length and drop_last."
        )
