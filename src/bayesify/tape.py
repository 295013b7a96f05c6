"""A network's run, taped once and played again for every draw.

The tape is the list of tensor operations that a network does for inputs of one shape. Played for
many draws, what does not depend on a draw is run once; a batch norm behind a convolution is folded
into it, so that it costs nothing; and a result that nobody needs any more is overwritten in place.
Nothing of the network is called, changed or copied.

A tape knows nothing of Python: a network that decides by the values in its tensors, or computes
outside torch, cannot be taped. The first is noticed while taping, the second by playing the tape
for other inputs and comparing (see `sampling.Runner`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from bayesify.batches import Inputs
from bayesify.posterior import Draws

aten = torch.ops.aten

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
BATCH_NORM = aten.batch_norm.default
IN_PLACE = {aten.relu.default: aten.relu_.default, aten.add.Tensor: aten.add_.Tensor}
# What does to each row of a sequence `[B, N, C]` the same as to the others.
BY_ROW = (
    aten.linear.default,
    aten.layer_norm.default,
    aten.gelu.default,
    aten.relu.default,
    aten.silu.default,
    aten.add.Tensor,
    aten.mul.Tensor,
)
# What writes its result into new memory, and keeps no other view of it.
FRESH = (*CONVOLUTIONS, BATCH_NORM, aten.linear.default, *IN_PLACE)


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Attention, whose draws join its batch under vmap."""
    query, key, value, *rest = args
    result: Tensor = _Attention.apply(query, key, value, tuple(rest), kwargs)
    return result


class _Attention(torch.autograd.Function):
    """torch has no vmap rule for its fast kernel, and would run one draw after another."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor:
        result: Tensor = aten.scaled_dot_product_attention.default(
            query, key, value, *rest, **kwargs
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: draws run together in prediction alone."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, rest: Any, kwargs: Any
    ) -> tuple[Tensor, int]:
        """Folds the draws into the batch."""
        size = info.batch_size
        several = [
            (t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0))
            for t, dim in zip((query, key, value), in_dims, strict=False)
        ]
        mask = rest[0] if rest else kwargs.get("attn_mask")
        if mask is not None and mask.ndim > 3 and mask.shape[0] > 1:
            mask = mask.repeat(size, *[1] * (mask.ndim - 1))
            rest, kwargs = (
                (rest and (mask, *rest[1:])),
                kwargs | ({} if rest else {"attn_mask": mask}),
            )
        result = _Attention.apply(*(t.flatten(0, 1) for t in several), rest, kwargs)
        return result.unflatten(0, (size, -1)), 0


TOGETHER = {aten.scaled_dot_product_attention.default: _attend}


class CannotTapeError(Exception):
    """The network does something that a tape cannot repeat."""


@dataclass(frozen=True)
class Slot:
    """A place for a tensor: an input, a constant, or the result of a step."""

    number: int


@dataclass(eq=False)
class Step:
    """One operation, with slots among its arguments where tensors go.

    Args:
        function: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        results: Slots of what it returns.
        random: Whether it depends on the draw.
        alike: Whether it returns one tensor of the kind and shape of its first argument.
        affine: Slots of the scale and shift by which a convolution does a batch norm's work too.
        last_uses: Slots that nobody reads after it.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    random: bool
    alike: bool
    affine: tuple[int, ...] = ()
    last_uses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [(i, v.number) for i, v in enumerate(self.args) if isinstance(v, Slot)]
        everywhere = [v for v in tree_iter((self.args, self.kwargs)) if isinstance(v, Slot)]
        self.nested = len(everywhere) > len(self.places)
        self._reads = [slot.number for slot in everywhere]

    def reads(self) -> list[int]:
        """The slots of its arguments."""
        return [*self._reads, *self.affine]

    def run(self, values: list[Any], *, fold: bool = True) -> None:
        """Runs it, and frees what nobody reads after it.

        Args:
            values: What is in each slot.
            fold: Whether a convolution's weights take in the norm behind it; otherwise its result
                does, which keeps the weights the same for all draws.
        """
        args, kwargs = list(self.args), self.kwargs
        if self.nested:
            args, kwargs = tree_map(lambda v: _filled(v, values), (args, kwargs))
        else:
            for place, number in self.places:
                args[place] = values[number]
        if not self.affine:
            function = self.function if fold else TOGETHER.get(self.function, self.function)
            result = function(*args, **kwargs)
        else:
            result = _convolve(self.function, args, *(values[n] for n in self.affine), fold=fold)
        if len(self.results) == 1:
            values[self.results[0]] = result
        else:
            for number, value in zip(self.results, tree_iter(result), strict=True):
                values[number] = value
        for number in self.last_uses:
            values[number] = None


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
        stacks: Whether draws can run together; found out by who made the tape.
    """

    stacks = False

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
        steps, self._slots = _one_row(steps, shapes, inputs, result)
        self._norms: list[tuple[Step, Step]] = []
        steps = self._fold_norms(steps)
        _overwrite(steps, result)
        self._trunk = [step for step in steps if not step.random]
        self._branch = [step for step in steps if step.random]
        outside = {n for step in self._branch for n in step.reads()}
        _free(self._trunk, {result} | outside)
        _free(self._branch, {result} | outside - {n for s in self._branch for n in s.results})

    def play(
        self, draws: Draws, inputs: Inputs, shared: Mapping[str, Tensor], *, chunk: int = 1
    ) -> Iterator[Tensor]:
        """Runs all draws on the same inputs.

        Args:
            draws: Stacked.
            inputs: Of the shape that was taped.
            shared: Tensors that all draws have in common.
            chunk: How many draws run together.

        Yields:
            Outputs of consecutive draws, stacked `[s, B, ...]`.
        """
        start, stacks = self._start(draws, inputs, shared)

        def branch(draw: Mapping[int, Tensor], *, fold: bool = False) -> Tensor:
            values = list(start)
            for number, tensor in draw.items():
                values[number] = tensor
            for step in self._branch:
                step.run(values, fold=fold)
            result: Tensor = values[self._result]
            return result

        parts = {number: stack.split(chunk) for number, stack in stacks.items()}
        for index in range(len(next(iter(parts.values())))):
            part = {number: stacked[index] for number, stacked in parts.items()}
            if chunk == 1:
                one = branch({number: stack[0] for number, stack in part.items()}, fold=True)
                yield one.unsqueeze(0).contiguous()
            else:
                yield vmap(branch)(part).contiguous()

    def _start(
        self, draws: Draws, inputs: Inputs, shared: Mapping[str, Tensor]
    ) -> tuple[list[Any], dict[int, Tensor]]:
        """What all draws share, and by slot what each draw has of its own, stacked."""
        values: list[Any] = [None] * self._slots
        for number, constant in self._constants.items():
            values[number] = constant
        for number, tensor in zip(self._inputs, inputs.tensors(), strict=True):
            values[number] = _channels_last(tensor)
        for name, tensor in shared.items():
            values[self._named[name]] = tensor
        stacks = {self._named[name]: stack for name, stack in draws.items()}
        for conv, norm in self._norms:
            own = [
                slot.number for slot in (*norm.args[1:], *conv.args[2:3]) if isinstance(slot, Slot)
            ]
            target: Any = stacks if any(number in stacks for number in own) else values
            given = [_filled(value, values, stacks) for value in norm.args[1:]]
            bias = _filled(conv.args[2], values, stacks) if len(conv.args) > 2 else None
            for number, value in zip(conv.affine, _affine(bias, given), strict=True):
                target[number] = value
        for step in self._trunk:
            step.run(values)
        return values, stacks

    def _fold_norms(self, steps: list[Step]) -> list[Step]:
        """Lets a convolution do the work of the batch norm behind it."""
        readers = Counter(number for step in steps for number in step.reads())
        makers = {number: step for step in steps for number in step.results}
        kept: dict[int, Step] = {}
        for step in steps:
            conv = makers.get(step.reads()[0]) if step.function is BATCH_NORM else None
            if (
                conv is None
                or conv.function not in CONVOLUTIONS
                or readers[conv.results[0]] > 1
                or not _in_evaluation(step)
                # A convolution that all draws share is better run once.
                or conv.random != step.random
                # Its numbers are there before the first step.
                or any(n in makers for n in (*step.reads()[1:], *conv.reads()[2:]))
            ):
                kept[id(step)] = step
                continue
            conv.results, conv.affine = step.results, (self._slots, self._slots + 1)
            self._slots += 2
            self._norms.append((conv, step))
        return list(kept.values())


class Recorder(TorchDispatchMode):
    """Tapes the operations done inside it.

    Args:
        named: The tensors that will be other ones for each draw, or each time.
        random: Which of these are a draw's.
        inputs: The inputs' tensors.
    """

    def __init__(
        self, named: Mapping[str, Tensor], random: Sequence[str], inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._alive: list[Tensor] = []
        self._slots: dict[int, int] = {}
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
        if not func._schema.is_mutable and all(id(output) in self._slots for output in outputs):
            return result  # dropout in evaluation mode, for instance, hands on its input
        slots = tree_map(lambda v: Slot(self._read(v)) if isinstance(v, Tensor) else v, args)
        named = tree_map(lambda v: Slot(self._read(v)) if isinstance(v, Tensor) else v, kwargs)
        random = any(self._slots[id(operand)] in self._random for operand in operands)
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
        number = self._slots.get(id(result), -1)
        if number not in self._made or number not in self._random:
            raise CannotTapeError("the output does not come from a draw by operations of torch")
        shapes = [tensor.shape for tensor in self._alive]
        return Tape(self._steps, self._constants, self._named, self._inputs, number, shapes)

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self._alive)
            self._alive.append(tensor)  # an id stands for this tensor as long as it lives
        return self._slots[id(tensor)]

    def _read(self, tensor: Tensor) -> int:
        known = id(tensor) in self._slots
        number = self._slot(tensor)
        if not known:
            self._constants[number] = tensor
        return number

    def _check_written(self, func: Any, args: tuple[Any, ...], *, random: bool) -> None:
        """Writing is repeated only into what the tape itself made, and made anew for each draw."""
        written = self._slots[id(args[0])] if args and isinstance(args[0], Tensor) else -1
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


def _one_row(
    steps: list[Step], shapes: Sequence[torch.Size], inputs: Sequence[int], result: int
) -> tuple[list[Step], int]:
    """Where a sequence's one row is all that is read, such as a class token, computes no other.

    The picking of that row moves up before what is done to every row alike. Returns the steps and
    the number of slots they use.
    """

    def pick(number: int, *, random: bool = False) -> Step:
        args = (Slot(number), *picks[0].args[1:])
        return Step(aten.select.int, args, {}, [rows[number]], random, alike=False)

    picks = [step for step in steps if _picks_row(step, shapes)]
    rows = {step.args[0].number: step.results[0] for step in picks}
    if len({step.args[2] for step in picks}) != 1 or len(rows) < len(picks):
        return steps, len(shapes)
    numbers = count(len(shapes))
    whole = {result}
    backwards: list[Step] = []
    for step in reversed(steps):
        made = step.results[0]
        if step in picks:
            continue
        if made in rows and made not in whole and _by_row(step, shapes):
            for number in (n for _, n in step.places if len(shapes[n]) == 3):
                rows[number] = rows.get(number) or next(numbers)
            args = tree_map(
                lambda v: Slot(rows.get(v.number, v.number)) if isinstance(v, Slot) else v,
                step.args,
            )
            backwards.append(replace(step, args=args, results=[rows[made]]))
            continue
        whole.update(step.reads())
        backwards += [pick(n, random=step.random) for n in step.results if n in rows]
        backwards.append(step)
    others = rows.keys() - {number for step in steps for number in step.results}
    if not others <= set(inputs):
        return steps, len(shapes)  # rows of a weight: left as they are
    return [pick(number) for number in others] + backwards[::-1], next(numbers)


def _picks_row(step: Step, shapes: Sequence[torch.Size]) -> bool:
    return (
        step.function is aten.select.int
        and step.args[1] == 1
        and len(shapes[step.args[0].number]) == 3
    )


def _by_row(step: Step, shapes: Sequence[torch.Size]) -> bool:
    """Whether a step's result `[B, N, C]` has rows that come from the same rows of its operands."""
    if step.function not in BY_ROW or step.nested:
        return False
    first = shapes[step.places[0][1]]
    if len(first) != 3:
        return False
    if step.function is aten.layer_norm.default:
        return len(step.args[1]) == 1
    if step.function is aten.linear.default:
        return True
    rest = [shapes[number] for _, number in step.places[1:]]
    return all(len(shape) < 2 or shape == first for shape in rest)


def _portable(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same operation in a form that takes channels-last order, and vmap."""
    if func is aten.view.default:
        return aten.reshape.default, args
    if func is aten.adaptive_avg_pool2d.default and list(args[1]) == [1, 1]:
        return aten.mean.dim, (args[0], [-2, -1], True)
    return func, args


def _convolve(function: Any, args: list[Any], scale: Tensor, shift: Tensor, *, fold: bool) -> Any:
    """A convolution and the batch norm behind it."""
    x, weight, _, *rest = args if len(args) > 2 else [*args, None]
    positions = [1] * (weight.ndim - 2)
    if fold:
        return function(x, weight * scale.view(-1, 1, *positions), shift, *rest)
    result = function(x, weight, None, *rest)
    return torch.addcmul(shift.view(-1, *positions), result, scale.view(-1, *positions))


def _affine(bias: Tensor | None, norm: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Scale and shift that a convolution's bias and a batch norm come to."""
    gamma, beta, mean, variance, _, _, eps, *_ = norm
    scale = (variance + eps).rsqrt()
    scale = scale if gamma is None else gamma * scale
    shift = (-mean if bias is None else bias - mean) * scale
    return scale, shift if beta is None else shift + beta


def _in_evaluation(norm: Step) -> bool:
    _, _, _, mean, _, training, *_ = norm.args
    return isinstance(mean, Slot) and not training


def _overwrite(steps: list[Step], result: int) -> None:
    """Writes results over operands that nobody reads again."""
    last = {number: index for index, step in enumerate(steps) for number in step.reads()}
    makers = {number: step for step in steps for number in step.results}
    looked_at = {n for step in steps if step.function not in FRESH for n in step.reads()}
    for index, step in enumerate(steps):
        if step.function not in IN_PLACE or not step.alike:
            continue
        number = step.args[0].number
        made = makers.get(number)
        if (
            made is not None
            and made.function in (*FRESH, *IN_PLACE.values())
            and made.random == step.random
            and last[number] == index
            and number not in looked_at
            and number != result
            and step.reads().count(number) == 1
        ):
            step.function = IN_PLACE[step.function]


def _free(steps: list[Step], kept: set[int]) -> None:
    """Notes with each step what is read there for the last time."""
    seen = set(kept)
    for step in reversed(steps):
        read = dict.fromkeys(step.reads())
        step.last_uses = [n for n in read if n not in seen and n not in step.results]
        seen.update(read)


def _filled(value: Any, values: Sequence[Any], stacks: Mapping[int, Tensor] | None = None) -> Any:
    """What stands in an argument, if it is a slot; all draws' if each has its own."""
    if not isinstance(value, Slot):
        return value
    stacked = (stacks or {}).get(value.number)
    return values[value.number] if stacked is None else stacked


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is not b and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _channels_last(tensor: Tensor) -> Tensor:
    """Images in the order in which convolutions are fastest."""
    if tensor.ndim == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
