"""Pixel units: what shifts and attacks do is done to pixels from 0 to 1."""

import torch
from torch import Tensor

from bayesify.batches import as_inputs
from bayesify.errors import DataError, SettingError
from bayesify.outliers import Normalisation


class Scale:
    """The way from a network's inputs to pixels between 0 and 1, and back.

    Args:
        x: All inputs, which are checked.
        normalisation: Mean and standard deviation of each channel, by which pixels were normalised;
            None if the network takes pixels as they are.

    Raises:
        DataError: If these are not images whose pixels run from 0 to 1.
        SettingError: If the normalisation does not go with them.

    Example:
        >>> x = torch.tensor([[-1.0, 1.0]])
        >>> Scale(x, ([0.5], [0.5])).pixels(x)
        tensor([[0., 1.]])
    """

    def __init__(self, x: Tensor, normalisation: Normalisation | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DataError(
                f"images must be a tensor of real numbers, and are {kind}. Convert them as for the "
                f"network: bytes by x.float() / 255."
            )
        as_inputs(x).require_finite()
        self.dtype = x.dtype
        # Changes are small: they need single precision, whatever the network takes.
        precise = torch.promote_types(x.dtype, torch.float32)
        given = ([0.0], [1.0]) if normalisation is None else normalisation
        shape = (1, -1, *(1 for _ in x.shape[2:])) if x.ndim > 1 else (-1,)
        parts = [torch.as_tensor(v, dtype=precise, device=x.device).reshape(shape) for v in given]
        channels = x.shape[1] if x.ndim > 1 else 1
        fits = len(parts) == 2 and {part.numel() for part in parts} <= {1, channels}
        if not fits or not (parts[1] > 0).all():
            raise SettingError(
                f"normalisation={normalisation!r} must be (mean, std), each with a number for "
                f"every one of {channels} channels, and std above 0."
            )
        self.mean, self.std = parts
        slack = max(1e-3, 4 * torch.finfo(x.dtype).eps)
        low, high = (float(value) for value in self.pixels(x).aminmax())
        if not -slack <= low <= high <= 1 + slack:
            done = "without normalisation" if normalisation is None else "by this normalisation"
            raise DataError(
                f"pixels must run from 0 to 1, and {done} these images run from {low:.2f} to "
                f"{high:.2f}. Pass normalisation=(mean, std), by which they were normalised, a "
                f"number a channel."
            )

    def pixels(self, x: Tensor) -> Tensor:
        """Pixels of inputs."""
        return x.detach().to(self.mean.dtype) * self.std + self.mean

    def inputs(self, pixels: Tensor) -> Tensor:
        """Inputs of pixels."""
        return ((pixels - self.mean) / self.std).to(self.dtype)
