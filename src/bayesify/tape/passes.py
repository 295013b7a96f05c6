"""What makes a tape faster: steps that run less often, on less, or in place."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesify.tape.kernels import ACTIVATIONS, aten
from bayesify.tape.steps import Slot, Step

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
# What writes its result into new memory, or over its first operand, and keeps no other view of it.
FRESH = (*CONVOLUTIONS, BATCH_NORM, aten.linear.default, *IN_PLACE, *IN_PLACE.values())


def fold_norms(steps: list[Step], slots: int) -> tuple[list[Step], list[tuple[Step, Step]]]:
    """Lets a convolution do the work of the batch norm behind it.

    Returns the steps, and the convolutions with their norms. Each convolution's scale and shift
    have slots of their own, from number `slots` on.
    """
    norms: list[tuple[Step, Step]] = []
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
        first = slots + 2 * len(norms)
        conv.results, conv.affine = step.results, (first, first + 1)
        norms.append((conv, step))
    return list(kept.values()), norms


def affine(bias: Tensor | None, norm: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Scale and shift that a convolution's bias and a batch norm come to."""
    gamma, beta, mean, variance, _, _, eps, *_ = norm
    scale = (variance + eps).rsqrt()
    scale = scale if gamma is None else gamma * scale
    shift = (-mean if bias is None else bias - mean) * scale
    return scale, shift if beta is None else shift + beta


def fuse(steps: list[Step], shapes: Sequence[torch.Size], result: int) -> list[Step]:
    """Lets convolutions do the addition and the activation behind them, linear layers the latter.

    They then run where the last of these stood. Returns other steps: draws that run
    together need those that there were.
    """
    fused: list[Step | None] = [replace(step) for step in steps]
    for place in range(len(fused)):
        here = place
        while (maker := fused[here]) is not None and (end := _next_reader(fused, here)) is not None:
            taken = _with_behind(maker, fused[end], shapes)
            old, later = maker.results[0], [step for step in fused[end + 1 :] if step is not None]
            needed = old == result or any(old in step.reads() for step in later)
            if taken is None or (taken.results[0] != old and needed):
                break
            fused[here], fused[end] = None, taken
            here = end
    return [step for step in fused if step is not None]


def _next_reader(steps: Sequence[Step | None], place: int) -> int | None:
    """Who first reads what a step made, if all that it reads itself is still the same there."""
    maker = steps[place]
    if maker is None or maker.function not in (aten.conv2d.default, aten.linear.default):
        return None
    for end in range(place + 1, len(steps)):
        step = steps[end]
        if step is not None and maker.results[0] in step.reads():
            return end
        if step is not None and step.function._schema.is_mutable:
            return None
    return None


def _with_behind(maker: Step, step: Step | None, shapes: Sequence[torch.Size]) -> Step | None:
    """A convolution or linear layer with the step behind it taken in, if it can do that."""
    if step is None or maker.then or step.random != maker.random or not step.alike:
        return None
    after_adding = maker.other is None or step.function in (aten.relu.default, aten.relu_.default)
    exact = step.kwargs in ({}, {"approximate": "none"})
    if step.function in ACTIVATIONS and exact and after_adding:
        return replace(maker, results=step.results, then=step.function)
    if maker.function is aten.linear.default or maker.other is not None:
        return None
    other = _added(maker.results[0], step, shapes)
    return None if other is None else replace(maker, results=step.results, other=other)


def _added(own: int, step: Step, shapes: Sequence[torch.Size]) -> int | None:
    """What a step adds to the tensor in a slot, number by number, if that is all it does."""
    if step.function not in (aten.add.Tensor, aten.add_.Tensor) or step.kwargs:
        return None
    read = step.reads()
    if len(set(read)) != 2 or max(read) >= len(shapes) or shapes[read[0]] != shapes[read[1]]:
        return None
    if step.function is aten.add_.Tensor and read[0] != own:
        return None  # it writes over the other
    return read[1] if read[0] == own else read[0]


def one_row(
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


def one_query(
    steps: list[Step], shapes: Sequence[torch.Size], slots: int
) -> tuple[list[Step], int]:
    """Where one row of what attention returns is all that is read, asks with that row alone.

    Returns the steps and the number of slots they use.
    """
    readers = Counter(number for step in steps for number in step.reads())
    makers = {number: step for step in steps for number in step.results}
    new: dict[int, list[Step]] = {}

    def maker(step: Step) -> Step:
        """What made the first operand, if nobody else reads that; otherwise the step itself."""
        number = step.places[0][1] if step.places else -1
        return makers.get(number, step) if readers[number] == 1 else step

    for step in steps:
        merged = maker(step)
        turned = maker(merged)
        attended = maker(turned)
        if not (
            step.function is aten.select.int
            and step.args[1] == 1
            and step.args[2] >= 0
            and merged.function is aten.reshape.default
            and turned.function is aten.transpose.int
            and turned.args[1:] == (1, 2)
            and _attends_to_all(attended)
            and len(shapes[attended.results[0]]) == 4
        ):
            continue
        batch, heads, rows, width = shapes[attended.results[0]]
        if merged.args[1] != [batch, rows, heads * width]:
            continue
        row = step.args[2]
        query = (attended.args[0], 2, row, row + 1)
        asking = Step(aten.slice.Tensor, query, {}, [slots], attended.random, alike=False)
        with_it = replace(attended, args=(Slot(slots), *attended.args[1:]), alike=False)
        new[id(attended)] = [asking, with_it]
        new[id(merged)] = [replace(merged, args=(merged.args[0], [batch, 1, heads * width]))]
        new[id(step)] = [replace(step, args=(step.args[0], 1, 0))]
        slots += 1
    return [each for step in steps for each in new.get(id(step), [step])], slots


def _attends_to_all(step: Step) -> bool:
    """Whether it is attention without a mask, so that a query's answer depends on no other."""
    if step.function is not aten.scaled_dot_product_attention.default or len(step.args) > 3:
        return False
    return step.kwargs.get("attn_mask") is None and not step.kwargs.get("is_causal")


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


def overwrite(steps: list[Step], result: int) -> None:
    """Writes results over operands that nobody reads again."""
    last = {number: index for index, step in enumerate(steps) for number in step.reads()}
    makers = {number: step for step in steps for number in step.results}
    looked_at = {n for step in steps if step.function not in FRESH for n in step.reads()}

    def may_go(number: int, index: int) -> bool:
        """Whether a step may write over the tensor in this slot."""
        step, made = steps[index], makers.get(number)
        return (
            made is not None
            and made.function in FRESH
            and made.random == step.random
            and last[number] == index
            and number not in looked_at
            and number != result
            and step.reads().count(number) == 1
        )

    for index, step in enumerate(steps):
        if step.other is not None:
            step.over = may_go(step.other, index)
        elif step.function in IN_PLACE and step.alike and may_go(step.args[0].number, index):
            step.function = IN_PLACE[step.function]


def free(steps: list[Step], kept: set[int]) -> None:
    """Notes with each step what is read there for the last time."""
    seen = set(kept)
    for step in reversed(steps):
        read = dict.fromkeys(step.reads())
        step.last_uses = [n for n in read if n not in seen and n not in step.results]
        seen.update(read)


def _in_evaluation(norm: Step) -> bool:
    _, _, _, mean, _, training, *_ = norm.args
    return isinstance(mean, Slot) and not training
