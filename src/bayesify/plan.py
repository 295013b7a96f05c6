"""What would become random, and what it would cost, before anything is done."""

import math
from dataclasses import dataclass, field

from torch import nn

from bayesify.batches import as_inputs
from bayesify.errors import SettingError
from bayesify.methods import ABNN, Method
from bayesify.replicas import private_copy
from bayesify.sites import (
    Site,
    Skipped,
    Where,
    check_where,
    in_execution_order,
    named_tensors,
    select,
)


@dataclass(frozen=True)
class Plan:
    """What a conversion would do.

    Args:
        method: The method asked.
        sites: The tensors that would become random.
        skipped: Normalisation layers that would stay as they are, and why.
        random_numbers: Random numbers of one draw.
        trainable: Parameters that `fit` would train.
        fraction: `trainable` as a fraction of the network's parameters.
        bytes: Size of the stored posterior's tensors.
        candidates: Names of all sites, chosen or not, in execution order.
        network: A private copy of the network, with the gates that the method needs.
    """

    method: Method
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    random_numbers: int
    trainable: int
    fraction: float
    bytes: int
    candidates: tuple[str, ...] = field(repr=False)
    network: nn.Module = field(repr=False, compare=False)

    def __str__(self) -> str:
        width = max([len(site.name) for site in self.sites] + [4])
        lines = [repr(self.method), "", f"{'site':<{width}}  {'layer':<18}{'shape':<12}numbers"]
        for site in self.sites:
            shape = "x".join(map(str, site.shape))
            numbers = f"{math.prod(site.shape):,}"
            lines.append(f"{site.name:<{width}}  {site.kind:<18}{shape:<12}{numbers:>7}")
        lines += ["", *(f"{name + ':':<19}{value}" for name, value in self.summary().items())]
        lines += [f"skipped {skip.name} ({skip.kind}): {skip.reason}" for skip in self.skipped]
        return "\n".join(lines)

    @property
    def shares_trunk(self) -> bool:
        """Whether layers stand before the first random one, and need to run but once."""
        if not self.sites:
            return False
        return self.method.shares_trunk or self.sites[0].name != self.candidates[0]

    def summary(self) -> dict[str, str]:
        """The totals, for people."""
        return {
            "sites": f"{len(self.sites)} of {len(self.candidates)}",
            "random numbers": f"{self.random_numbers:,} a draw",
            "trainable": f"{self.trainable:,} parameters, {self.fraction:.2%} of the network's",
            "size on disk": f"{self.bytes / 1000:,.1f} kB",
        }


def plan(
    model: nn.Module,
    method: Method | None = None,
    *,
    where: Where = None,
    example: object = None,
) -> Plan:
    """Shows what `convert` would make random, without doing it.

    Args:
        model: A trained network. It is left as it is.
        method: The method; ABNN by default.
        where: Which sites: a glob or globs over tensor names, the number of last sites, a
            fraction of them, or a predicate on the name; all by default.
        example: Inputs on which a copy of the network runs once, to learn the order in which its
            layers execute; without it they count in the order they are registered.

    Raises:
        NothingToRandomiseError: If the network has nothing the method could make random.
        UnknownSiteError: If `where` matches nothing.

    Example:
        >>> print(plan(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), ABNN(members=2, draws=8)))
        ... # doctest: +ELLIPSIS
        ABNN(noise=0.1, draws=8, members=2, ...
        size on disk:      0.1 kB
    """
    method = ABNN() if method is None else method
    if not isinstance(model, nn.Module):
        raise SettingError(f"model must be a torch.nn.Module, and is a {type(model).__name__}.")
    if not isinstance(method, Method):
        raise SettingError(f"method must be an object such as ABNN(members=3), and is {method!r}.")
    check_where(where)
    network = private_copy(model)
    candidates, skipped = method.find(network)
    if example is not None:
        inputs = as_inputs(example)
        candidates = in_execution_order(
            candidates, private_copy(network), lambda copy: copy(*inputs.args, **inputs.kwargs)
        )
    sites = select(candidates, where)
    posterior = method.posterior(sites, named_tensors(network))
    trainable = sum(tensor.numel() for tensor in posterior.parameters())
    return Plan(
        method=method,
        sites=tuple(sites),
        skipped=tuple(skipped),
        random_numbers=sum(math.prod(shape) for shape in posterior.shapes().values()),
        trainable=trainable,
        fraction=trainable / max(1, sum(tensor.numel() for tensor in model.parameters())),
        bytes=sum(tensor.nbytes for tensor in posterior.tensors().values()),
        candidates=tuple(site.name for site in candidates),
        network=network,
    )
