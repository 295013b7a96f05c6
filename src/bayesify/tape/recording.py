"""Taping what a network does."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from bayesify.tape.cutting import Cut
from bayesify.tape.kernels import aten
from bayesify.tape.playing import Tape
from bayesify.tape.steps import Slot, Step

MARK = "_bayesify_slot"


class CannotTapeError(Exception):
    """The network does something that a tape cannot repeat."""


class Recorder(TorchDispatchMode):
    """Tapes the operations done inside it.

    Args:
        named: The tensors that will be other ones for each draw, or each time. They and the inputs
            get a mark, so that they should not be anybody else's.
        random: Which of these are a draw's.
        inputs: The inputs' tensors.
    """

    def __init__(
        self, named: Mapping[str, Tensor], random: Sequence[str], inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._token = object()
        self._shapes: list[torch.Size] = []
        self._constants: dict[int, Tensor] = {}
        self._steps: list[Step] = []
        self._made: set[int] = set()
        self._viewed: set[int] = set()
        self._named = {name: self._slot(tensor) for name, tensor in named.items()}
        self._inputs = [self._slot(tensor) for tensor in inputs]
        self._random = {self._named[name] for name in random}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        _check(func, result)
        outputs = list(tree_iter(result))
        operands = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        if not func._schema.is_mutable and all(map(self._is_known, outputs)):
            return result  # dropout in evaluation mode, for instance, hands on its input
        slots = tree_map(lambda v: Slot(self._read(v)) if isinstance(v, Tensor) else v, args)
        named = tree_map(lambda v: Slot(self._read(v)) if isinstance(v, Tensor) else v, kwargs)
        random = any(self._slot(operand) in self._random for operand in operands)
        if func._schema.is_mutable:
            self._check_written(func, args, random=random)
        numbers = [self._slot(output) for output in outputs]
        self._made.update(numbers)
        if random:
            self._random.update(numbers)
        if any(_same_memory(output, operand) for output in outputs for operand in operands):
            self._viewed.update(numbers)
        alike = len(outputs) == 1 and bool(operands) and _alike(outputs[0], operands[0])
        func, slots = _portable(func, slots)
        self._steps.append(Step(func, slots, named, numbers, random, alike))
        return result

    def tape(self, result: Tensor) -> Tape:
        """What was taped, up to the network's output.

        Raises:
            CannotTapeError: If the output was not made by an operation on the tape.
        """
        number = self._result(result)
        return Tape(self._steps, self._constants, self._named, self._inputs, number, self._shapes)

    def cut(self, result: Tensor) -> Cut:
        """What was taped, up to the network's output, cut where draws come in.

        Raises:
            CannotTapeError: If the output was not made by an operation on the tape.
        """
        number = self._result(result)
        return Cut(self._steps, self._constants, self._named, self._inputs, number, self._shapes)

    def _result(self, result: Tensor) -> int:
        number = self._slot(result)
        if number not in self._made or number not in self._random:
            raise CannotTapeError("the output does not come from a draw by operations of torch")
        return number

    def _slot(self, tensor: Tensor) -> int:
        """The number of a tensor, which it wears: tensors come and go, and with them their ids."""
        token, number = getattr(tensor, MARK, (None, -1))
        if token is not self._token:
            number = len(self._shapes)
            self._shapes.append(tensor.shape)
            setattr(tensor, MARK, (self._token, number))
        return number

    def _is_known(self, tensor: Tensor) -> bool:
        return getattr(tensor, MARK, (None, -1))[0] is self._token

    def _read(self, tensor: Tensor) -> int:
        known = self._is_known(tensor)
        number = self._slot(tensor)
        if not known:
            self._constants[number] = tensor
        return number

    def _check_written(self, func: Any, args: tuple[Any, ...], *, random: bool) -> None:
        """Writing is repeated only into what the tape itself made, and made anew for each draw."""
        written = self._slot(args[0]) if args and isinstance(args[0], Tensor) else -1
        if written not in self._made or written in self._viewed:
            raise CannotTapeError(f"{func} writes into what it did not make")
        if random and written not in self._random:
            raise CannotTapeError(f"{func} writes into what all draws share")


def _check(func: Any, result: Any) -> None:
    """Raises if an operation cannot be repeated for other values."""
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        raise CannotTapeError(f"{func} depends on values")
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    if seeded and func not in (aten.dropout.default, aten.scaled_dot_product_attention.default):
        raise CannotTapeError(f"{func} is random")
    if not all(isinstance(output, Tensor) for output in tree_iter(result)):
        raise CannotTapeError(f"{func} does not return tensors alone")


def _portable(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same operation in a form that takes channels-last order, and vmap."""
    if func is aten.view.default:
        return aten.reshape.default, args
    if func is aten.adaptive_avg_pool2d.default and list(args[1]) == [1, 1]:
        return aten.mean.dim, (args[0], [-2, -1], True)
    return func, args


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is not b and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
