"""Distributions over named tensors, and their draws by seed.

A draw is a `dict[str, Tensor]` from tensor names to values; draws come stacked, one leading
dimension for all of them. Draw i of a seed is the same bit for bit whatever else is drawn, on any
device and in any process, because every tensor's noise has a generator of its own, keyed by
(seed, draw, name).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bayesify.sites import Site

Draws = dict[str, Tensor]


def key(*parts: object) -> int:
    """A 63-bit seed from anything printable, the same in every process."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def normals(shapes: Mapping[str, Sequence[int]], *, seed: int, indices: Sequence[int]) -> Draws:
    """Standard normal noise for the draws `indices` of a seed, stacked.

    Example:
        >>> together = normals({"w": (3,)}, seed=0, indices=[0, 1])
        >>> alone = normals({"w": (3,)}, seed=0, indices=[1])
        >>> bool((together["w"][1] == alone["w"][0]).all())
        True
    """
    generator = torch.Generator()
    noise = {}
    for name, shape in shapes.items():
        stack = torch.empty(len(indices), *shape)
        for row, index in zip(stack, indices, strict=True):
            generator.manual_seed(key("draw", seed, index, name))
            row.copy_(torch.randn(tuple(shape), generator=generator))
        noise[name] = stack
    return noise


def fresh_normals(shapes: Mapping[str, Sequence[int]], *, seed: int, count: int) -> Draws:
    """Standard normal noise for `count` training draws, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, *shape, generator=generator) for name, shape in shapes.items()}


class NamedTensors(nn.Module):
    """Parameters under the names they have in the network, dots and all.

    Example:
        >>> NamedTensors({"fc.weight": torch.zeros(2)})["fc.weight"].shape
        torch.Size([2])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "/") for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self._names[name], nn.Parameter(tensor.detach().clone()))

    def __getitem__(self, name: str) -> nn.Parameter:
        """The parameter of that name."""
        parameter = self._parameters[self._names[name]]
        assert parameter is not None  # noqa: S101  (register_parameter was given a tensor)
        return parameter

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters."""
        return ((name, self[name]) for name in self)


class Posterior(nn.Module, ABC):
    """A distribution over some of a network's tensors: a mixture of one or more components.

    Its parameters are all that `fit` trains and all that is stored. `noise` scales its standard
    deviation: with `noise=0`, a component's draws are its mean.
    """

    components: int
    noise: float

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The noise that a draw needs: its tensors' shapes by name."""

    @abstractmethod
    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:
        """Makes draws of noise, differentiable in the parameters.

        Args:
            component: Which component each draw is from, `[S]`.
            noise: Standard normal numbers, `[S, ...]` for each name of `shapes()`.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""

    def draws(self, seed: int, indices: Sequence[int]) -> Draws:
        """The draws `indices` of a seed, stacked; components take turns."""
        anchor = next(self.parameters())
        noise = normals(self.shapes(), seed=seed, indices=indices)
        moved = {name: value.to(anchor.device) for name, value in noise.items()}
        component = torch.tensor(list(indices), device=anchor.device) % self.components
        drawn: Draws = self(component, moved)
        return drawn


class Members(Posterior):
    """A mixture of M members, each with scales of its own under multiplicative noise.

    tensor = w_m + (offset + w_m) noise eps, which is gamma_m (1 + noise eps) for
    gamma = offset + w, written so that without noise a draw is w_m bit for bit. Shifts are w_m
    without noise.

    Args:
        sites: The random scales, and the shifts that go with them.
        tensors: The network's tensors, by name: where every member starts.
        members: How many.
        noise: Relative standard deviation of the scales.
    """

    def __init__(
        self, sites: Sequence[Site], tensors: Mapping[str, Tensor], members: int, noise: float
    ) -> None:
        super().__init__()
        self.components = members
        self.noise = noise
        self._sites = tuple(sites)
        names = dict.fromkeys(name for site in sites for name in (site.name, *site.shifts))
        self.values = NamedTensors(
            {name: tensors[name].expand(members, *tensors[name].shape) for name in names}
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number an element of each scale."""
        return {site.name: site.shape for site in self._sites}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:
        """Draws of the members asked for."""
        draws: Draws = {name: value[component] for name, value in self.values.items()}
        for site in self._sites:
            mean = draws[site.name]
            spread = self.noise * noise[site.name].to(mean.dtype)
            draws[site.name] = mean + (site.offset + mean) * spread
        return draws

    def tensors(self) -> dict[str, Tensor]:
        """Each member's scales and shifts, `[M, ...]`, by the names they have in the network."""
        return {name: value.detach() for name, value in self.values.items()}
