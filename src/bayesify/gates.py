"""Gates: scales on the inputs of layers, put into a private copy of a network.

A gate is a buffer of ones beside a layer's weight and a hook that multiplies the layer's input by
it, so that scaling the input channels of a layer is replacing one small tensor, as any other draw
is. A gate can also have a row for each example of a batch. Ones leave every bit of the input as it
is. The user's network never gets a gate.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.errors import DataError
from bayesify.sites import Site, slots

GATE = "input_scale"
_CONVOLUTIONS = nn.modules.conv._ConvNd
_PROJECTIONS: tuple[str, ...] = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
)


def gate_inputs(network: nn.Module, *, biases: bool = False) -> list[Site]:
    """Puts a gate before every linear and convolutional layer of a private copy.

    The projections of `nn.MultiheadAttention`, and of some other attention, are used without being
    called, so that no hook sees their input: there the site names the weight whose columns are to
    be scaled instead.

    Args:
        network: A private copy.
        biases: Adds sites that scale the layers' biases.

    Returns:
        The gates, in the order their layers are registered.
    """
    sites: list[Site] = []
    uncalled = set()
    tensors = slots(network)  # one that several modules share, by the name it has in the first
    for prefix, module in network.named_modules():
        path = f"{prefix}." if prefix else ""
        uncalled |= {id(layer) for layer in _uncalled(module)}
        if isinstance(module, nn.MultiheadAttention):
            names = _PROJECTIONS
        elif id(module) in uncalled:
            names = ("weight",)
        elif (channels := input_channels(module)) is not None:
            sites.append(add_gate(module, path, channels, _scale_input))
            names = ()
        else:
            continue
        names += ("bias", "in_proj_bias") if biases else ()
        sites += [_scale_of(module, path, name) for name in names if path + name in tensors]
    return sites


def add_gate(module: nn.Module, path: str, channels: int, hook: Callable[..., Any]) -> Site:
    """Puts a gate of ones before a module; `hook`, a pre-hook with keywords, reads it."""
    like = next(module.parameters(), torch.empty(0))
    ones = torch.ones(channels, dtype=like.dtype, device=like.device)
    module.register_buffer(GATE, ones, persistent=False)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    return Site(path + GATE, (channels,), type(module).__name__)


def input_channels(module: nn.Module) -> int | None:
    """How many channels the input of a linear or convolutional layer has; None for others."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, _CONVOLUTIONS):
        return module.in_channels
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return len(weight)  # transformers' linear layer of GPT-2, its weight transposed
    return None


def _uncalled(module: nn.Module) -> Iterator[nn.Module]:
    """The linear layers in a module whose weight it uses itself."""
    if isinstance(module, nn.MultiheadAttention):
        yield module.out_proj
    elif not type(module).__module__.startswith("torch.nn."):  # whose fast paths make way for hooks
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                reads = rf"\bself\.{re.escape(name)}\.weight\b(?!\.(dtype|device|shape|size))"
                if re.search(reads, _source(type(module).forward)):
                    yield layer


@functools.cache
def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _scale_of(module: nn.Module, path: str, name: str) -> Site:
    """A site that scales a tensor of a module rather than its input."""
    weight = getattr(module, name)
    shape = weight.shape[-1:]
    module.register_buffer(f"{name}_scale", weight.new_ones(shape), persistent=False)
    return Site(f"{path}{name}_scale", tuple(shape), type(module).__name__, weight=path + name)


def _scale_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    scale = module._buffers[GATE]
    assert scale is not None  # noqa: S101  (the hook came with it)
    pixels = len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else 0

    def at_channels(x: Tensor) -> Tensor:
        between = x.ndim - scale.ndim - pixels if scale.ndim > 1 else 0
        if not (between or pixels):
            return scaled(x, scale)
        shape = (*scale.shape[:-1], *(1,) * between, scale.shape[-1], *(1,) * pixels)
        return scaled(x, scale.reshape(shape))

    return map_input(at_channels, args, kwargs)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """An input times a gate, in the input's type and on its device."""
    scale = scale.to(x.device, x.dtype)
    if x.is_nested:  # as `nn.TransformerEncoder` makes of padded batches; it has no product
        return torch.nested.as_nested_tensor([part * scale for part in x.unbind()])
    return x * scale


def map_input(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Applies a function to the first argument of a call, given by place or by keyword."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: function(kwargs[name])}


def map_images(
    function: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    who: str,
    instead: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Applies a function to the images of a call: its first tensor of real numbers.

    Args:
        function: Of images `[B, C, H, W]`.
        args: The call's arguments.
        kwargs: Its keywords.
        who: For the error, "... images".
        instead: What to do without.

    Raises:
        DataError: If that is no batch of images, or there is none.
    """
    named = [*enumerate(args), *kwargs.items()]
    found = next((n for n, v in named if isinstance(v, Tensor) and v.is_floating_point()), None)
    images = None if found is None else dict(named)[found]
    if images is None or images.ndim != 4:
        shape = "there is none" if images is None else f"it has shape {list(images.shape)}"
        raise DataError(
            f"{who} images: the first tensor of real numbers among the inputs must be "
            f"[B, C, H, W], and {shape}. {instead}"
        )
    new = function(images)
    return (
        tuple(new if place == found else value for place, value in enumerate(args)),
        {name: new if name == found else value for name, value in kwargs.items()},
    )
