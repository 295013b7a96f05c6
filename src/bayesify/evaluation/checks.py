"""What measures ask of the tensors they get, before they compute anything."""

import torch
from torch import Tensor

from bayesify.errors import DataError, SettingError

SLACK = 1e-3  # by which a mean of probabilities may round outside [0, 1]


def numbers(name: str, values: Tensor, *, finite: bool = True) -> Tensor:
    """Values in double precision, on the CPU.

    Raises:
        DataError: If there is none, or one is NaN or, where that matters, infinite.
    """
    require_numbers(name, values, finite=finite)
    return values.detach().cpu().double()


def require_numbers(name: str, values: Tensor, *, finite: bool = True) -> None:
    """Raises where `numbers` does."""
    if not values.numel():
        raise DataError(f"{name} is empty: there is nothing to measure.")
    bad = ~torch.isfinite(values) if finite else torch.isnan(values)
    if bad.any():
        kinds = "NaN or infinite numbers" if finite else "NaN"
        raise DataError(
            f"{name} holds {kinds}, {int(bad.sum())} of {bad.numel()}: nothing can be measured on "
            f"them. Look for extreme inputs, or drop these examples."
        )


def probabilities(name: str, values: Tensor) -> Tensor:
    """Probabilities in double precision, cut to [0, 1] where they round a hair outside it.

    Raises:
        DataError: If they are something else, logits for instance.
    """
    wide = numbers(name, values)
    low, high = wide.min().item(), wide.max().item()
    if low < -SLACK or high > 1 + SLACK:
        raise DataError(
            f"{name} runs from {low:.4g} to {high:.4g} and must be probabilities. Turn logits into "
            f"probabilities by softmax first."
        )
    return wide.clamp(0, 1)


def flags(name: str, values: Tensor) -> Tensor:
    """Yes or no, as booleans on the CPU.

    Raises:
        DataError: If there is anything but 0 and 1, or True and False.
    """
    given = values.detach().cpu()
    if not ((given == 0) | (given == 1)).all():
        raise DataError(f"{name} must be True or False, 0 or 1, and holds other values.")
    return given.bool()


def alike(**tensors: Tensor) -> None:
    """Raises if tensors differ in shape."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise DataError(f"shapes must agree, and are {shapes}.")


def classes(probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, C, ...]` without NaN, and class numbers `[B, ...]` that go with them.

    Raises:
        DataError: If they do not.
    """
    target = target.to(probs.device)
    require_numbers("probs", probs)
    fits = probs.ndim > 1 and target.shape == (probs.shape[0], *probs.shape[2:])
    if not fits or target.is_floating_point():
        raise DataError(
            f"target {list(target.shape)} ({target.dtype}) does not go with probabilities "
            f"{list(probs.shape)}: it must be whole class numbers [batch, ...], not one-hot."
        )
    low, high, most = int(target.min()), int(target.max()), probs.shape[1]
    if low < 0 or high >= most:
        raise DataError(f"labels run from {low} to {high}, and there are {most} classes.")
    return probs, target.long()


def count(name: str, value: int, least: int = 1) -> int:
    """A whole number, `least` or more.

    Raises:
        SettingError: If it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name}={value!r} must be a whole number, {least} or more.")
    return value


def share(name: str, value: float) -> float:
    """A number above 0 and below 1.

    Raises:
        SettingError: If it is something else.
    """
    if not 0 < value < 1:
        raise SettingError(f"{name}={value!r} must be above 0 and below 1.")
    return float(value)
