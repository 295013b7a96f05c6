"""A tape, and how it is played."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from bayesify.batches import Inputs
from bayesify.posterior import Draws
from bayesify.tape.kernels import (
    ROWS,
    aten,
    can_fuse,
    channels_last,
    is_heavy,
    linear,
    pack,
    scaled,
)
from bayesify.tape.passes import affine, fold_norms, free, fuse, one_query, one_row, overwrite
from bayesify.tape.steps import Slot, Step, filled

# Weights of the trunk that are kept with the norms behind them folded in; beyond, each is for as
# long as it takes to run it, so that there is no copy of a large network.
KEPT = 1 << 20


class Tape:
    """A network's operations for inputs of one shape.

    Args:
        steps: In the order they were done.
        constants: Tensors that are neither inputs nor results, by slot.
        named: Slots of the tensors that draws, or what draws share, put into the network.
        inputs: Slots of the inputs.
        result: Slot of the network's output.
        shapes: What shape each slot's tensor had.

    Attributes:
        widest: Bytes of the largest result that each draw has of its own.
        stacks: Whether draws can run together; None if nobody tried.
        compiles: Whether what each draw runs can be compiled; None if nobody tried.
    """

    stacks: bool | None = None
    compiles: bool | None = None

    def __init__(
        self,
        steps: list[Step],
        constants: Mapping[int, Tensor],
        named: Mapping[str, int],
        inputs: Sequence[int],
        result: int,
        shapes: Sequence[torch.Size],
    ) -> None:
        self._constants = constants
        self._named = named
        self._inputs = inputs
        self._result = result
        steps, slots = one_row(steps, shapes, inputs, result)
        steps, slots = one_query(steps, shapes, slots)
        steps, self._norms = fold_norms(steps, slots)
        self._slots = slots + 2 * len(self._norms)
        self._kept: dict[int, Tensor] = {}
        self._program: Callable[..., Tensor] | None = None
        trunk = [conv for conv, _ in self._norms if not conv.random]
        if sum(shapes[conv.args[1].number].numel() for conv in trunk) <= KEPT:
            for conv in trunk:
                conv.folded = True
        alone = fuse(steps, shapes, result)
        for each in (alone, steps):
            overwrite(each, result)
        self._trunk = [step for step in alone if not step.random]
        self._branch = [step for step in steps if step.random]
        self._alone = [step for step in alone if step.random]
        made = [shapes[n] for step in self._branch for n in step.results if n < len(shapes)]
        self.widest = 4 * max(1, *(shape.numel() for shape in made))
        read = {n for step in self._branch for n in step.reads()}
        self._outside = read - {n for step in self._branch for n in step.results}
        free(self._trunk, {result} | read)
        for each in (self._branch, self._alone):
            free(each, {result} | self._outside)
        self._shapes = shapes
        for step in alone:
            if step.random and _is_worth_ordering(step, shapes):
                step.ordered = self._slots
                self._slots += 1
            if step.function is aten.linear.default:
                step.function, step.then = partial(linear, then=step.then), None

    def play(
        self,
        draws: Draws,
        inputs: Inputs,
        shared: Mapping[str, Tensor],
        *,
        chunk: int = 1,
        compiled: bool = False,
        spare: int = 0,
    ) -> Iterator[Tensor]:
        """Runs all draws on the same inputs.

        Args:
            draws: Stacked.
            inputs: Of the shape that was taped.
            shared: Tensors that all draws have in common.
            chunk: How many draws run together.
            compiled: Whether a draw runs as compiled code, which is made the first time.
            spare: Bytes that may go into making single draws faster.

        Yields:
            Outputs of consecutive draws, stacked `[s, B, ...]`.
        """
        start, stacks = self._start(draws, inputs, shared)

        def run(draw: Mapping[int, Tensor]) -> Tensor:
            if chunk > 1:
                together = vmap(lambda each: self._run(self._branch, start, each, fold=False))
                return together(draw).contiguous()
            one = {number: stack[0] for number, stack in draw.items()}
            if compiled:
                return self._run_compiled(start, one).unsqueeze(0)
            return self._run(self._alone, start, one).unsqueeze(0).contiguous()

        if chunk == 1 and not compiled:
            self._order(start, stacks, spare)
        read = {number: stack for number, stack in stacks.items() if number in self._outside}
        count = len(next(iter(read.values())))
        for first in range(0, count, chunk):
            whole = chunk >= count
            last = first + chunk
            yield run(read if whole else {n: stack[first:last] for n, stack in read.items()})

    def _run(
        self,
        steps: Sequence[Step],
        start: Sequence[Any],
        draw: Mapping[int, Tensor],
        *,
        fold: bool = True,
    ) -> Tensor:
        values = list(start)
        for number, tensor in draw.items():
            values[number] = tensor
        for step in steps:
            step.run(values, fold=fold)
        result: Tensor = values[self._result]
        return result

    def _run_compiled(self, start: Sequence[Any], draw: Mapping[int, Tensor]) -> Tensor:
        numbers = sorted(self._outside | draw.keys())
        tensors = [draw.get(number, start[number]) for number in numbers]

        def run(*tensors: Tensor) -> Tensor:
            values = dict(zip(numbers, tensors, strict=True))
            return self._run(self._branch, [None] * self._slots, values)

        if self._program is None:
            from torch.fx.experimental.proxy_tensor import make_fx

            # Of the operations alone, so that no call has to look whether a step has changed.
            self._program = torch.compile(make_fx(run)(*tensors), dynamic=False)
        return self._program(*tensors)

    def _order(self, start: list[Any], stacks: Mapping[int, Tensor], spare: int) -> None:
        """Orders weights once for all draws that run alone, so far as there is memory to spare."""
        for step in self._alone:
            if step.ordered is None or step.args[1].number in stacks:
                continue
            weight, x = start[step.args[1].number], self._shapes[step.args[0].number]
            if weight is None or weight.nbytes > spare or not can_fuse(weight):
                continue
            spare -= weight.nbytes
            packs = is_heavy(weight.shape, x) or weight.ndim == 2
            start[step.ordered] = pack(weight, x, step.args[3:]) if packs else channels_last(weight)

    def _start(
        self, draws: Draws, inputs: Inputs, shared: Mapping[str, Tensor]
    ) -> tuple[list[Any], dict[int, Tensor]]:
        """What all draws share, and by slot what each draw has of its own, stacked."""
        values: list[Any] = [None] * self._slots
        for number, constant in self._constants.items():
            values[number] = constant
        for number, tensor in zip(self._inputs, inputs.tensors(), strict=True):
            values[number] = channels_last(tensor)
        for name, tensor in shared.items():
            values[self._named[name]] = tensor
        stacks = {self._named[name]: stack for name, stack in draws.items()}
        self._fold(values, stacks, shared)
        for step in self._trunk:
            step.run(values)
        return values, stacks

    def _fold(
        self, values: list[Any], stacks: dict[int, Tensor], shared: Mapping[str, Tensor]
    ) -> None:
        """Puts into their slots what makes convolutions do their norms' work.

        Constants never change, while what draws share may, as statistics do that adapt.
        """
        kept: dict[int, Tensor] = {} if shared else self._kept
        folded: dict[int, Tensor] = {}
        for conv, norm in self._norms:
            if conv.affine[0] in kept:
                continue
            own = [s.number for s in (*norm.args[1:], *conv.args[2:3]) if isinstance(s, Slot)]
            target: Any = stacks if any(number in stacks for number in own) else values
            given = [filled(value, values, stacks) for value in norm.args[1:]]
            bias = filled(conv.args[2], values, stacks) if len(conv.args) > 2 else None
            scale, shift = affine(bias, given)
            if conv.folded:
                scale = scaled(filled(conv.args[1], values), scale)
                if can_fuse(scale) and scale.ndim == 4:
                    scale = pack(scale, self._shapes[conv.args[0].number], conv.args[3:])
                target = folded
            target[conv.affine[0]], target[conv.affine[1]] = scale, shift
        if folded and not shared:
            self._kept = folded  # all at once, as other threads may come
        for number, tensor in (folded or kept).items():
            values[number] = tensor


def _is_worth_ordering(step: Step, shapes: Sequence[torch.Size]) -> bool:
    """Whether a step has weights that are faster in another order."""
    if step.function is aten.conv2d.default:
        return bool(step.affine)
    number = step.args[0].number if step.function is aten.linear.default else len(shapes)
    return number < len(shapes) and shapes[number][:-1].numel() >= ROWS
