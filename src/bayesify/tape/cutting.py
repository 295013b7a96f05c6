"""A network's operations in two halves: what runs before anything that trains, and the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesify.tape.kernels import aten
from bayesify.tape.passes import BATCH_NORM, affine, free
from bayesify.tape.steps import Step

# Rows of a sequence beyond which all pairs of them are too many to be held in memory.
LONG = 512


class Cut:
    """A network cut in two, for one example.

    The cut is the set of values that the rest reads, and that come from the example without
    anything that trains: usually one tensor, several where a shortcut crosses the cut. Both halves
    can be run under `vmap`, and gradients go through the rest.

    Args:
        steps: In the order they were done for one example; those that depend on what trains
            are the random ones.
        constants: Tensors that are neither inputs nor results, by slot.
        named: Slots of the tensors that train.
        inputs: Slots of the inputs.
        result: Slot of the network's output.
        shapes: What shape each slot's tensor had.

    Attributes:
        share: Which part of all numbers that the network computes is computed before the cut.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        constants: Mapping[int, Tensor],
        named: Mapping[str, int],
        inputs: Sequence[int],
        result: int,
        shapes: Sequence[torch.Size],
    ) -> None:
        # Tensors made while taping may not be used in training as they are.
        self._constants = {n: t.clone() if t.is_inference() else t for n, t in constants.items()}
        self._named = named
        self._inputs = inputs
        self._result = result
        self._slots = len(shapes)
        own = set(inputs)
        for step in steps:
            if not step.random and own.intersection(step.reads()):
                own.update(step.results)
        read = {number for step in steps if step.random for number in step.reads()}
        self.slots = sorted(read & own)
        trunk = [step for step in steps if not step.random]
        rest = [step for step in steps if step.random or not own.intersection(step.results)]
        self._trunk = _needed(trunk, set(self.slots))
        self._rest = _needed(rest, {result})
        before, behind = (
            sum(shapes[n].numel() for step in half for n in step.results)
            for half in (self._trunk, self._rest)
        )
        self.share = before / max(1, before + behind)

    def trunk(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values at the cut, of one example."""
        values = self._start()
        for number, tensor in zip(self._inputs, inputs, strict=True):
            values[number] = tensor
        for step in self._trunk:
            step.run(values)
        return tuple(values[number] for number in self.slots)

    def rest(self, named: Mapping[str, Tensor], features: Sequence[Tensor]) -> Tensor:
        """The network's output, of the values at the cut of one example."""
        values = self._start()
        for name, tensor in named.items():
            values[self._named[name]] = tensor
        for number, tensor in zip(self.slots, features, strict=True):
            values[number] = tensor
        for step in self._rest:
            step.run(values)
        result: Tensor = values[self._result]
        return result

    def _start(self) -> list[Any]:
        values: list[Any] = [None] * self._slots
        for number, constant in self._constants.items():
            values[number] = constant
        return values


def _needed(steps: Sequence[Step], wanted: set[int]) -> list[Step]:
    """The steps that some slots need, each free to be changed."""
    kept: list[Step] = []
    slots = set(wanted)
    for step in reversed(steps):
        if slots.intersection(step.results):
            slots.update(step.reads())
            kept.append(replace(step, function=_under_vmap(step)))
    kept.reverse()
    free(kept, wanted)
    return kept


def _under_vmap(step: Step) -> Any:
    """What a step does, in a form that is fast under vmap and has gradients."""
    if step.function is BATCH_NORM and not step.args[5]:
        return _normalise
    if step.function is aten.scaled_dot_product_attention.default:
        return _attend
    return step.function


def _normalise(x: Tensor, *norm: Any) -> Tensor:
    """A batch norm in evaluation, as one multiplication and addition."""
    scale, shift = affine(None, norm)
    positions = [1] * (x.ndim - 2)
    return torch.addcmul(shift.view(-1, *positions), x, scale.view(-1, *positions))


def _attend(query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Attention by matrix products; vmap runs torch's kernel for one example after another."""
    result: Tensor
    if max(query.shape[-2], key.shape[-2]) > LONG:
        result = aten.scaled_dot_product_attention.default(query, key, *rest, **kwargs)
    else:
        result, _ = aten._scaled_dot_product_attention_math.default(query, key, *rest, **kwargs)
    return result
