"""Norms with a row of scales for each example, so that a batch runs at many draws as one.

Under vmap a normalisation layer brings images out of the order that convolutions are fast in, and
attention may have no rule at all. Scale and shift come last in a norm: they can as well be applied
to its result, each example's own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_CHANNELS_FIRST = (functional.batch_norm, functional.group_norm, functional.instance_norm)
_CHANNELS_LAST = (functional.layer_norm, functional.rms_norm)


class Rows(TorchFunctionMode):
    """While it is active, torch's norms take scales and shifts with a row for each example."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function; a norm with rows in two steps."""
        settings = kwargs or {}
        if func in _CHANNELS_FIRST:
            own, pixels = 1, args[0].ndim - 2
        elif func in _CHANNELS_LAST:
            own, pixels = len(args[1]), 0
        else:
            return func(*args, **settings)
        scale, shift = settings["weight"], settings.get("bias")
        if all(value is None or value.ndim == own for value in (scale, shift)):
            return func(*args, **settings)
        bare = {name: None if name in ("weight", "bias") else v for name, v in settings.items()}
        x = func(*args, **bare)

        def spread(value: Tensor) -> Tensor:
            rows, rest = value.shape[:-own], value.shape[-own:]
            between = (1,) * (x.ndim - value.ndim - pixels)
            return value.to(x.dtype).reshape(*rows, *between, *rest, *(1,) * pixels)

        if shift is None:
            return x * spread(scale)
        return torch.addcmul(spread(shift), x, spread(scale))
