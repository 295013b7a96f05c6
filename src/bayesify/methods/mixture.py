r"""A mixture of methods: each makes the network Bayesian in its own way, and all are averaged.

$$p(y | x) = \frac{1}{P} \sum_p \mathbb{E}_{w \sim q_p}[p(y | x, w)]$$

The parts are fitted one after another, each as it would be alone on the same sites: all that it can
make random, unless `where` says otherwise. What ensembles win, they win here: networks that were
trained apart, even from one checkpoint and with different noise, err on different inputs. As -log
is convex, a mixture is at least as likely as its parts are on average.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError, UnknownSiteError
from bayesify.methods.abnn import ABNN
from bayesify.methods.bayes_adapter import BayesAdapter
from bayesify.methods.ibnn import IBNN
from bayesify.methods.method import Method
from bayesify.posterior import Draws, NamedTensors, Posterior
from bayesify.sites import Site, Skipped, slots


@dataclass(frozen=True, kw_only=True)
class Mixture(Method):
    """Several methods on one network, each with an equal share of the draws.

    Args:
        parts: The methods, or their names; on the command line, names with commas between them.
            Files have them as {"name": ..., "settings": ...}.
        noise: A factor on the noise of every part.
        draws: Draws of a prediction, over all parts and their components.

    Example:
        >>> Mixture().components  # as often of BayesAdapter as of iBNN, which has four
        12
        >>> Mixture(parts="abnn,mc-dropout", draws=12).parts[0].components
        3
    """

    parts: Sequence[Method] = (ABNN(members=2), BayesAdapter(), IBNN())
    noise: float = 1.0
    draws: int = 24

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _read(self.parts))
        super().__post_init__()

    @property
    def components(self) -> int:
        """So many that every part, and every component of it, comes equally often."""
        return len(self.parts) * math.lcm(*(part.components for part in self.parts))

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """What any part can make random."""
        found: dict[str, list[PartSite]] = {}
        skipped: list[Skipped] = []
        for index, part in enumerate(self.parts):
            before = dict(network.named_buffers())
            sites, others = part.find(network)
            after = dict(network.named_buffers())
            if twice := [name for name in before if after[name] is not before[name]]:
                raise SettingError(
                    f"{type(part).__name__} scales the inputs of {twice[0].rpartition('.')[0]!r}, "
                    f"as another part of the mixture does: one part may do so."
                )
            for site in sites:
                found.setdefault(site.name, []).append(PartSite(**vars(site), part=index))
            skipped += others
        order = [site for name in slots(network) for site in found.get(name, [])]
        return list[Site](order), list(dict.fromkeys(skipped))

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """Each part's own, over its sites."""
        posteriors = []
        for index, part in enumerate(self.parts):
            own = part_sites(sites, index)
            if not own:
                raise UnknownSiteError(
                    f"{type(part).__name__}, a part of the mixture, is left with nothing to make "
                    f"random. Choose more with where=, or drop that part."
                )
            posteriors.append(part.posterior(own, tensors))
        adapt = [part.adapts_statistics for part in self.parts]
        return Parts(posteriors, adapt, tensors, self.components, self.noise)

    @property
    def adapts_statistics(self) -> bool:
        """If a part's do."""
        return any(part.adapts_statistics for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The settings, for JSON."""
        from bayesify.methods import method_name

        parts = [{"name": method_name(p), "settings": p.to_dict()} for p in self.parts]
        return {"parts": parts, "noise": self.noise, "draws": self.draws}


@dataclass(frozen=True)
class PartSite(Site):
    """A site of one part of a mixture."""

    part: int = 0


def part_sites(sites: Sequence[Site], index: int) -> list[Site]:
    """The sites of a mixture that belong to one of its parts."""
    return [site for site in sites if isinstance(site, PartSite) and site.part == index]


class Parts(Posterior):
    """Several distributions over tensors of one network, equally likely.

    Draw i is of part i mod P. It has all tensors that differ in any part: what its own part leaves
    alone is the network's.

    Args:
        parts: The distributions.
        adapt: Whether running statistics adapt, of each.
        tensors: The network's tensors, by name.
        components: How many draws it takes until all components of all parts have come.
        noise: A factor on the noise of every part.
    """

    def __init__(
        self,
        parts: Sequence[Posterior],
        adapt: Sequence[bool],
        tensors: Mapping[str, Tensor],
        components: int,
        noise: float,
    ) -> None:
        super().__init__()
        self.components = components
        self.parts = nn.ModuleList(parts)
        self._adapt = tuple(adapt)
        self._tensors = tensors
        # Of each part at a factor of 1: what its method says, or what its fit left.
        own = torch.tensor([part.noise for part in parts], dtype=torch.float64)
        self.strengths = NamedTensors({"noise": own}, trainable=False)
        self.noise = noise
        self._keep_originals()

    @property
    def noise(self) -> float:
        """The factor."""
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._noise = value
        for part, strength in zip(self.members(), self.strengths["noise"].tolist(), strict=True):
            part.noise = value * strength

    def part_fitted(self, index: int) -> None:
        """To be called when a part was fitted, which may have changed its noise."""
        self.strengths["noise"][index] = self.members()[index].noise
        self.noise = self.noise  # in all parts

    def adopt_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Each part whose statistics adapt has its own."""
        for part, adapts in zip(self.members(), self._adapt, strict=True):
            if adapts:
                part.adopt_statistics(statistics)
        self._keep_originals()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What the parts need."""
        return {name: shape for part in self.members() for name, shape in part.shapes().items()}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:
        """Draws of the parts whose turn it is."""
        parts = self.members()
        turn, own = component % len(parts), component // len(parts)
        rows = [(turn == index).nonzero().flatten() for index in range(len(parts))]
        back = torch.cat(rows).argsort()
        drawn = [
            self._drawn(part, own[mine], {name: value[mine] for name, value in noise.items()})
            for part, mine in zip(parts, rows, strict=True)
        ]
        return {name: torch.cat([draw[name] for draw in drawn])[back] for name in self.originals}

    def _drawn(self, part: Posterior, own: Tensor, noise: Mapping[str, Tensor]) -> Draws:
        """A part's draws, of every tensor that differs in any part."""
        alike = {**dict(self.originals.items()), **part.shared()}
        draws = {name: value.expand(len(own), *value.shape) for name, value in alike.items()}
        return {**draws, **part(own % part.components, noise)}

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: each part's, by its number."""
        own = {
            f"{index}:{name}": value
            for index, part in enumerate(self.members())
            for name, value in part.tensors().items()
        }
        return {**own, "strengths": self.strengths["noise"]}

    def _keep_originals(self) -> None:
        """Notes what the network has in place of the tensors that differ."""
        with torch.no_grad():
            names = {n for part in self.members() for n in (*part.draws(0, [0]), *part.shared())}
        kept = {name: value for name, value in self._tensors.items() if name in names}
        self.originals = NamedTensors(kept, trainable=False)

    def members(self) -> list[Posterior]:
        """The parts."""
        return cast("list[Posterior]", list(self.parts))


def _read(parts: Any) -> tuple[Method, ...]:
    """Methods, from methods, names or what JSON has of them."""
    from bayesify.methods import make_method

    if isinstance(parts, str):
        parts = [name.strip() for name in parts.split(",")]
    if not isinstance(parts, Sequence):
        raise SettingError(f"parts={parts!r} must be a list of methods.")
    read: list[Method] = []
    for part in parts:
        if isinstance(part, str):
            read.append(make_method(part, {}))
        elif isinstance(part, Mapping) and set(part) == {"name", "settings"}:
            read.append(make_method(part["name"], part["settings"]))
        elif isinstance(part, Method) and not isinstance(part, Mixture):
            read.append(part)
        else:
            raise SettingError(
                f"parts has {part!r}, which is neither a method, such as BayesAdapter(), nor the "
                f"name of one."
            )
    if len(read) < 2:
        raise SettingError("a mixture needs two parts or more: use the method by itself.")
    return tuple(read)
