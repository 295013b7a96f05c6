"""Convolutions that do the work of what stands behind them, and matrix products, by oneDNN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# oneDNN's convolution adds and clips what it has just computed, which saves reading it again, and
# keeps weights in an order of its own. torch.compile stands on these operations too, but they have
# no public name.
mkldnn = torch.ops.mkldnn
FUSES = torch.backends.mkldnn.is_available() and all(
    hasattr(mkldnn, name)
    for name in (
        "_convolution_pointwise",
        "_convolution_pointwise_",
        "_linear_pointwise",
        "_reorder_convolution_weight",
        "_reorder_linear_weight",
    )
)
# What it can do last, what it calls that, and by which algorithm it does it.
ACTIVATIONS = {
    aten.relu.default: ("relu", ""),
    aten.relu_.default: ("relu", ""),
    aten.silu.default: ("swish", ""),
    aten.silu_.default: ("swish", ""),
    aten.hardswish.default: ("hardswish", ""),
    aten.hardswish_.default: ("hardswish", ""),
    aten.gelu.default: ("gelu", "none"),
}
NOTHING = ("none", "")
# Rows below which bringing a linear layer's weights into its order costs more than it wins.
ROWS = 64
# Weights for a number of the input beyond which bringing them into order is most of the work: that
# is quicker for images that are not channels-last.
MUCH = 8


def convolve(
    function: Any,
    args: list[Any],
    affine: tuple[Tensor, Tensor] | None = None,
    *,
    fold: bool = True,
    other: Tensor | None = None,
    over: bool = False,
    then: Any = None,
) -> Tensor:
    """A convolution, then a batch norm, an addition and an activation, as far as there are any.

    Args:
        function: The convolution.
        args: Its arguments; the weights may be packed.
        affine: Scale and shift that its bias and the norm come to.
        fold: Whether its weights may take in the scale; otherwise its result does, which keeps the
            weights the same for all draws.
        other: What is added, of the result's shape.
        over: Whether the result may be written over that.
        then: The activation, one of `ACTIVATIONS`.
    """
    x, weight, bias, *rest = args if len(args) > 2 else [*args, None]
    if affine is None:
        scale = shift = None
    elif fold and not is_heavy(weight.shape, x.shape):
        weight, bias, scale, shift = scaled(weight, affine[0]), affine[1], None, None
    else:
        bias, (scale, shift) = None, affine
    at_once = scale is None and (other is None or over)
    if weight.is_mkldnn or (at_once and (then or over) and can_fuse(x) and weight.ndim == 4):
        result = _convolve(x, weight, bias, rest, *((other, then) if at_once else ()))
        if at_once:
            return result
    elif fold and can_fuse(x) and weight.ndim == 4 and weight.numel() > MUCH * x.numel():
        result = channels_last(function(x.contiguous(), weight, bias, *rest))
    else:
        result = function(x, weight, bias, *rest)
    if scale is not None and shift is not None:
        positions = [1] * (weight.ndim - 2)
        result = torch.addcmul(shift.view(-1, *positions), result, scale.view(-1, *positions))
    if other is not None:
        result = result.add_(other)
    return then(result) if then else result


def is_heavy(weight: torch.Size, x: torch.Size) -> bool:
    """Whether a convolution has more weights than inputs: the smaller of the two is scaled."""
    return weight.numel() > x.numel()


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """A convolution's weight with its results' scale taken in."""
    return weight * scale.view(-1, *[1] * (weight.ndim - 1))


def pack(weight: Tensor, x: torch.Size, rest: Sequence[Any]) -> Tensor:
    """Weights of a convolution or linear layer in oneDNN's own order for inputs of this shape."""
    if weight.ndim == 2:
        ordered: Tensor = mkldnn._reorder_linear_weight(weight, x[:-1].numel())
        return ordered
    stride, padding, dilation, groups = _geometry(rest)
    packed: Tensor = mkldnn._reorder_convolution_weight(
        channels_last(weight), padding, stride, dilation, groups, list(x)
    )
    return packed


def channels_last(tensor: Tensor) -> Tensor:
    """Images in the order in which convolutions are fastest."""
    if tensor.ndim == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, then: Any = None) -> Tensor:
    """A linear layer and an activation, one of `ACTIVATIONS`, if there is any.

    MKL, which torch takes for it, was a fifth slower on the processor that we tried, of AMD.
    """
    if can_fuse(x) and weight.dtype is x.dtype and x.shape[:-1].numel() >= ROWS:
        name, algorithm = ACTIVATIONS.get(then, NOTHING)
        result: Tensor = mkldnn._linear_pointwise.default(x, weight, bias, name, [], algorithm)
        return result
    result = aten.linear.default(x, weight, bias)
    return then(result) if then else result


def can_fuse(tensor: Tensor) -> bool:
    """Whether oneDNN takes what comes from such a tensor, of a linear layer or 2-D convolution."""
    if not (FUSES and tensor.is_cpu and tensor.dtype is torch.float32):
        return False
    return bool(torch.backends.mkldnn.enabled)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rest: list[Any],
    other: Tensor | None = None,
    then: Any = None,
) -> Tensor:
    stride, padding, dilation, groups = _geometry(rest)
    settings = (weight, bias, padding, stride, dilation, groups)
    name, algorithm = ACTIVATIONS.get(then, NOTHING)
    result: Tensor
    if other is None:
        result = mkldnn._convolution_pointwise.default(x, *settings, name, [], algorithm)
    else:
        result = mkldnn._convolution_pointwise_.binary(
            other, x, *settings, "add", 1.0, name if then else None, [], algorithm
        )
    return result


def _geometry(rest: Sequence[Any]) -> list[Any]:
    """Stride, padding, dilation and groups, those that are not given as torch has them."""
    return [*rest, *([1, 1], [0, 0], [1, 1], 1)[len(rest) :]]
