"""Distributions over named tensors, and their draws by seed.

A draw is a `dict[str, Tensor]` from tensor names to values; draws come stacked, one leading
dimension for all of them. Draw i of a seed is the same bit for bit whatever else is drawn, on any
device and in any process, because every tensor's noise has a generator of its own, keyed by
(seed, draw, name).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesify.sites import Site

Draws = dict[str, Tensor]

POOL = 1 << 20
KEPT_BYTES = 1 << 24  # of noise, from one prediction to the next


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
    """Standard normal noise for `count` training draws, from one generator.

    Random numbers are dear where every weight of a large network needs one for every example:
    beyond `POOL` of them, tensors are windows into a pool of that many, at random places, and a
    tensor's draws are windows shifted against each other. Each draw of a tensor is still made of
    independent numbers; what a window shares with another falls on other weights.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if count * sum(sizes.values()) <= POOL:
        return {
            name: torch.randn(count, *shape, generator=generator) for name, shape in shapes.items()
        }
    pool = torch.randn(max(POOL, 2 * max(sizes.values())), generator=generator)
    noise = {}
    for name, size in sizes.items():
        shift = (len(pool) - size) // (2 * count)
        room = len(pool) - size - (count - 1) * shift
        start = int(torch.randint(room + 1, (), generator=generator))
        rows = pool.as_strided((count, size), (shift, 1), start)
        noise[name] = rows.view(count, *shapes[name])
    return noise


class NamedTensors(nn.Module):
    """Tensors under the names they have in the network, dots and all.

    Args:
        tensors: Their values, which are copied.
        trainable: Whether they are parameters, or buffers that training by gradient leaves alone.

    Example:
        >>> NamedTensors({"fc.weight": torch.zeros(2)})["fc.weight"].shape
        torch.Size([2])
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, trainable: bool = True) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "/") for name in tensors}
        for name, tensor in tensors.items():
            value = tensor.detach().clone()
            if trainable:
                self.register_parameter(self._names[name], nn.Parameter(value))
            else:
                self.register_buffer(self._names[name], value)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name."""
        own = self._names[name]
        found = self._parameters[own] if own in self._parameters else self._buffers[own]
        assert found is not None  # noqa: S101  (it was registered with a tensor)
        return found

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors."""
        return ((name, self[name]) for name in self)


class Posterior(nn.Module, ABC):
    """A distribution over some of a network's tensors: a mixture of one or more components.

    Its parameters are all that `fit` trains and all that is stored. `noise` scales its standard
    deviation: with `noise=0`, a component's draws are its mean.
    """

    components: int
    noise: float

    def __init__(self) -> None:
        super().__init__()
        self.statistics = NamedTensors({})
        self._last_noise: tuple[object, Draws] = (None, {})

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

    def shared(self) -> dict[str, Tensor]:
        """Tensors that take the place of the network's own and are the same in every draw."""
        return dict(self.statistics.items())

    def in_training(self) -> "Posterior":
        """The distribution that training runs the network at, if that is another one."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {
            f"{kind}:{name}": value.detach()
            for kind, group in self.named_children()
            if isinstance(group, NamedTensors)
            for name, value in group.items()
        }

    def varies(self) -> bool:
        """Whether draws differ at all."""
        return self.components > 1 or bool(self.shapes())

    @torch.no_grad()
    def is_certain(self) -> bool:
        """Whether draws are all alike, at any noise, as they are where nothing was fitted yet."""
        anchor = next(chain(self.parameters(), self.buffers()), torch.empty(0))
        component = torch.arange(self.components, device=anchor.device).repeat(2)
        # Far out on either side, where dropout too has to differ.
        size = torch.tensor([40.0, -40.0], device=anchor.device).repeat_interleave(self.components)
        noise = {
            name: size.view(-1, *[1] * len(shape)).expand(-1, *shape)
            for name, shape in self.shapes().items()
        }
        before, self.noise = self.noise, 1.0
        try:
            drawn: Draws = self(component, noise)
        finally:
            self.noise = before
        return all(torch.equal(value, value[:1].expand_as(value)) for value in drawn.values())

    def adopt_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Takes over the running statistics of normalisation layers, so that they can adapt."""
        self.statistics = NamedTensors(statistics, trainable=False)

    def draws(self, seed: int, indices: Sequence[int]) -> Draws:
        """The draws `indices` of a seed, stacked; components take turns.

        A component's draws come in pairs with opposite noise: what a prediction owes to the noise
        in first order cancels within a pair, so that fewer draws do (antithetic variates).
        """
        anchor = next(chain(self.parameters(), self.buffers()), torch.empty(0))
        noise = {n: value.to(anchor.device) for n, value in self._mirrored(seed, indices).items()}
        component = torch.tensor(list(indices), device=anchor.device) % self.components
        drawn: Draws = self(component, noise)
        return drawn

    def _mirrored(self, seed: int, indices: Sequence[int]) -> Draws:
        """Noise in mirrored pairs; the last is kept if it is small, as it depends on no weight."""
        asked = (seed, tuple(indices), self.components, tuple(self.shapes().items()))
        last, noise = self._last_noise
        if last == asked:
            return noise
        mirrored = [index // self.components % 2 for index in indices]
        originals = [i - self.components * odd for i, odd in zip(indices, mirrored, strict=True)]
        sign = 1.0 - 2.0 * torch.tensor(mirrored)
        noise = {
            name: value * sign.view(-1, *[1] * (value.ndim - 1))
            for name, value in normals(self.shapes(), seed=seed, indices=originals).items()
        }
        if sum(value.nbytes for value in noise.values()) <= KEPT_BYTES:
            self._last_noise = (asked, noise)
        return noise


class Fixed(Posterior):
    """A distribution that is certain: the network's own tensors."""

    components = 1
    noise = 0.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """No tensor differs from the network's."""
        return {}


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
        own = {name: value.detach() for name, value in self.values.items()}
        return {**own, **{f"statistics:{n}": v for n, v in self.statistics.items()}}


class MeanField(Posterior):
    """Independent Gaussians: tensor = mu + noise exp(psi) eps.

    Args:
        sites: What is random.
        tensors: The network's tensors, by name: where the means start.
        log_std: For each tensor, the two numbers that its psi starts uniform between.
        noise: A factor on all standard deviations.
    """

    components = 1

    def __init__(
        self,
        sites: Sequence[Site],
        tensors: Mapping[str, Tensor],
        log_std: Mapping[str, tuple[float, float]],
        noise: float,
    ) -> None:
        super().__init__()
        self.noise = noise
        means = {site.name: tensors[site.name] for site in sites}
        self.mean = NamedTensors(means)
        self.log_std = NamedTensors(
            {name: _uniform(name, value, *log_std[name]) for name, value in means.items()}
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number an element."""
        return {name: tuple(value.shape) for name, value in self.mean.items()}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """Draws around the means."""
        return {
            # One pass over what is a copy of the network for every draw.
            name: torch.addcmul(mean, self.noise * self.log_std[name].exp(), noise[name].to(mean))
            for name, mean in self.mean.items()
        }

    def kl(self, prior_std: float) -> Tensor:
        """KL divergence from the prior N(0, prior_std^2), summed over all numbers."""
        return sum(
            (
                gaussian_kl(mean, self.log_std[name], 0.0, prior_std)
                for name, mean in self.mean.items()
            ),
            start=torch.zeros(()),
        )


class Latent(Posterior):
    """Random scales around 1 from a mixture of K Gaussians, over weights that train too.

    z = 1 + noise (mu_k - 1 + sigma_k eps), sigma = softplus(rho). A scale stands in a gate, or,
    where a site names a weight, it multiplies the columns of that (or a bias, element by element).

    Args:
        sites: The scales, one number a column of the weight that a site may name.
        tensors: The network's tensors, by name.
        trained: Names of the weights and biases that train.
        components: K.
        mean_std: mu starts as N(1, mean_std^2).
        std: sigma starts as |N(mean, spread^2)| of this pair.
        noise: A factor on the distance from 1.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        tensors: Mapping[str, Tensor],
        trained: Sequence[str],
        *,
        components: int,
        mean_std: float,
        std: tuple[float, float],
        noise: float,
    ) -> None:
        super().__init__()
        self.components = components
        self.noise = noise
        self._sites = tuple(sites)
        means, rhos = {}, {}
        for site in sites:
            like = tensors[site.name]
            shape = (components, *site.shape)
            means[site.name] = 1 + mean_std * _seeded_normal("mean", site.name, shape, like)
            sigma = (std[0] + std[1] * _seeded_normal("std", site.name, shape, like)).abs()
            rhos[site.name] = sigma.clamp_min(1e-4).expm1().log()  # softplus, turned round
        self.mean = NamedTensors(means)
        self.rho = NamedTensors(rhos)
        self.weights = NamedTensors({name: tensors[name] for name in trained})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number a column of each layer's weight."""
        return {site.name: site.shape for site in self._sites}

    def shared(self) -> dict[str, Tensor]:
        """The weights, which all draws have in common."""
        return {**super().shared(), **dict(self.weights.items())}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:
        """Draws of the components asked for."""
        draws = {}
        for site in self._sites:
            mean, rho = self.mean[site.name][component], self.rho[site.name][component]
            spread = softplus(rho) * noise[site.name].to(mean.dtype)
            scale = 1 + self.noise * (mean - 1 + spread)
            if site.weight is None:
                draws[site.name] = scale
            else:
                weight = self.weights[site.weight]
                draws[site.weight] = weight * (scale.unsqueeze(1) if weight.ndim > 1 else scale)
        return draws

    def kl(self, prior_std: float) -> Tensor:
        """KL divergence of the components' average from the prior N(1, prior_std^2), summed.

        The average of one draw of each component is Gaussian, with the mean of the means and the
        variance sum(sigma_k^2) / K^2.
        """
        total = torch.zeros(())
        for name, mean in self.mean.items():
            variance = softplus(self.rho[name]).square().mean(0) / self.components
            total = total + gaussian_kl(mean.mean(0), variance.log() / 2, 1.0, prior_std)
        return total


def gaussian_kl(mean: Tensor, log_std: Tensor, prior_mean: float, prior_std: float) -> Tensor:
    """KL(N(mean, exp(log_std)^2) | N(prior_mean, prior_std^2)), summed over all numbers.

    Example:
        >>> gaussian_kl(torch.zeros(3), torch.zeros(3), 0.0, 1.0)
        tensor(0.)
    """
    ratio = log_std - math.log(prior_std)
    distance = (mean - prior_mean) / prior_std
    return 0.5 * ((2 * ratio).exp() + distance.square() - 1 - 2 * ratio).sum()


def _uniform(name: str, like: Tensor, low: float, high: float) -> Tensor:
    generator = torch.Generator().manual_seed(key("log_std", name))
    return (low + (high - low) * torch.rand(like.shape, generator=generator)).to(like)


def _seeded_normal(what: str, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(key(what, name))
    return torch.randn(shape, generator=generator).to(like)
