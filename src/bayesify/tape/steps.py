"""The operations on a tape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_iter, tree_map

from bayesify.tape.kernels import aten, convolve, linear


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
        folded: Whether these hold a weight and bias that do it already.
        ordered: Slot of its weights in the order in which they are fastest.
        other: Slot of what a convolution adds to its result.
        over: Whether it may write its result over that.
        then: Activation that a convolution does last.
        last_uses: Slots that nobody reads after it.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    random: bool
    alike: bool
    affine: tuple[int, ...] = ()
    folded: bool = False
    ordered: int | None = None
    other: int | None = None
    over: bool = False
    then: Any = None
    last_uses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [(i, v.number) for i, v in enumerate(self.args) if isinstance(v, Slot)]
        everywhere = [v for v in tree_iter((self.args, self.kwargs)) if isinstance(v, Slot)]
        self.nested = len(everywhere) > len(self.places)
        self._reads = [slot.number for slot in everywhere]

    def reads(self) -> list[int]:
        """The slots of its arguments."""
        other = () if self.other is None else (self.other,)
        return [*self._reads, *self.affine, *other]

    def run(self, values: list[Any], *, fold: bool = True) -> None:
        """Runs it, and frees what nobody reads after it.

        Args:
            values: What is in each slot.
            fold: Whether a convolution's weights may take in the norm behind it; otherwise its
                result does, which keeps the weights the same for all draws.
        """
        args, kwargs = list(self.args), self.kwargs
        if self.nested:
            args, kwargs = tree_map(lambda v: filled(v, values), (args, kwargs))
        else:
            for place, number in self.places:
                args[place] = values[number]
        if self.ordered is not None and values[self.ordered] is not None:
            args[1] = values[self.ordered]
        if not (self.affine or self.then or self.other is not None):
            function = self.function if fold else _TOGETHER.get(self.function, self.function)
            result = function(*args, **kwargs)
        else:
            result = self._convolve(args, values, fold=fold)
        if len(self.results) == 1:
            values[self.results[0]] = result
        else:
            for number, value in zip(self.results, tree_iter(result), strict=True):
                values[number] = value
        for number in self.last_uses:
            values[number] = None

    def _convolve(self, args: list[Any], values: list[Any], *, fold: bool) -> Tensor:
        affine = [values[number] for number in self.affine]
        if self.folded:
            args, affine = [args[0], *affine, *args[3:]], []
        other = None if self.other is None else values[self.other]
        return convolve(
            self.function,
            args,
            (affine[0], affine[1]) if affine else None,
            fold=fold,
            other=other,
            over=self.over,
            then=self.then,
        )


def filled(value: Any, values: Sequence[Any], stacks: Mapping[int, Tensor] | None = None) -> Any:
    """What stands in an argument, if it is a slot; all draws' if each has its own."""
    if not isinstance(value, Slot):
        return value
    stacked = (stacks or {}).get(value.number)
    return values[value.number] if stacked is None else stacked


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


def _transform(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, whose draws join its batch under vmap."""
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


class _Linear(torch.autograd.Function):
    """torch's vmap rule multiplies first and then adds the bias in another pass."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: draws run together in prediction alone."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        """Folds the draws into the batch, unless each has weights of its own."""
        if in_dims[1:] != (None, None):
            return vmap(aten.linear.default, in_dims)(x, weight, bias), 0
        together = x.movedim(in_dims[0], 0)
        if x.ndim < 3:
            return linear(together, weight, bias), 0
        result = linear(together.flatten(0, 1), weight, bias)
        return result.unflatten(0, (info.batch_size, -1)), 0


_TOGETHER = {aten.scaled_dot_product_attention.default: _attend, aten.linear.default: _transform}
