"""Finding the tensors of a network that may become random, and naming them.

A site is the scale of a normalisation layer, by the name its tensor has in the network. Layers are
recognised by what they are called and by what they do, so no library that defines them is imported:
a tensor is a layer's scale if setting it to minus the offset makes the output independent of the
input. The offset is 0 for most layers and 1 for those that store gamma - 1 (Gemma's).
"""

import copy
import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, dropwhile

import torch
from torch import Tensor, nn

from bayesify.errors import NothingToRandomiseError, SettingError, UnknownSiteError

Where = str | Sequence[str] | float | Callable[[str], bool] | None

NORM = re.compile(r"norm|(bn|abn)(\d?d)?$", re.IGNORECASE)
_TORCH_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Site:
    """One tensor that can become random, with the tensors that go with it.

    Args:
        name: The tensor's name in the network, as in `network.named_parameters()`.
        shape: Its shape: one random number an element.
        kind: The class of the layer it belongs to.
        offset: The layer scales by `offset + tensor`.
        shifts: Names of the layer's shift tensors, not random but trainable.
        weight: Name of the weight whose columns the tensor scales, where it acts on no input.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: float = 0.0
    shifts: tuple[str, ...] = ()
    weight: str | None = None


@dataclass(frozen=True)
class Skipped:
    """A normalisation layer that cannot be a site, and why."""

    name: str
    kind: str
    reason: str


def slots(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """Maps the first name of each parameter and buffer to every place it stands in the network.

    A module registered twice is one place; one parameter used by two modules is two places.
    """
    places: dict[int, dict[tuple[int, str], str]] = {}
    for prefix, module in network.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(id(tensor), {}).setdefault((id(module), attribute), name)
    groups = [tuple(found.values()) for found in places.values()]
    return {group[0]: group for group in groups}


def find_norms(network: nn.Module) -> tuple[list[Site], list[Skipped]]:
    """Finds the normalisation layers of a network, in the order they are registered.

    The network is not run and not changed: each unknown layer is tried on a copy of its own.

    Example:
        >>> sites, skipped = find_norms(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
        >>> [(site.name, site.kind, site.shifts) for site in sites]
        [('1.weight', 'LayerNorm', ('1.bias',))]
    """
    first_name = {place: group[0] for group in slots(network).values() for place in group}
    sites: dict[str, Site] = {}
    skipped = []
    for prefix, layer in _norm_layers(network):
        kind = type(layer).__name__
        found = _scale(layer)
        if isinstance(found, str):
            skipped.append(Skipped(prefix, kind, found))
            continue
        attribute, offset = found
        scale = getattr(layer, attribute)
        path = f"{prefix}." if prefix else ""
        shifts = tuple(
            first_name[path + other]
            for other, parameter in layer.named_parameters(recurse=False)
            if other != attribute and parameter.shape == scale.shape
        )
        name = first_name[path + attribute]
        if name in sites:  # one scale tensor that two layers share
            known = sites[name]
            sites[name] = replace(known, shifts=tuple(dict.fromkeys(known.shifts + shifts)))
        else:
            sites[name] = Site(name, tuple(scale.shape), kind, offset, shifts)
    return list(sites.values()), skipped


def find_parameters(network: nn.Module) -> tuple[list[Site], list[Skipped]]:
    """Finds every parameter that holds real numbers, tied ones once.

    Raises:
        NothingToRandomiseError: If there is none.

    Example:
        >>> [site.name for site in find_parameters(nn.Linear(2, 3))[0]]
        ['weight', 'bias']
    """
    sites, skipped = [], []
    for name, parameter in network.named_parameters():
        kind = type(network.get_submodule(name.rpartition(".")[0])).__name__
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            reason = "not initialised yet: run the network once before converting it"
            skipped.append(Skipped(name, kind, reason))
        elif not parameter.is_floating_point():
            skipped.append(Skipped(name, kind, "its numbers are not real"))
        else:
            sites.append(Site(name, tuple(parameter.shape), kind))
    if not sites:
        raise NothingToRandomiseError(
            "the network has no parameter of real numbers that could become random."
        )
    return sites, skipped


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """A network's parameters and buffers, by name."""
    return dict(chain(network.named_parameters(), network.named_buffers()))


def find_statistics(network: nn.Module, sites: Sequence[Site]) -> dict[str, Tensor]:
    """The running means and variances of normalisation layers, by name, from the first site on.

    Those of layers registered before it are left out: nothing changes what they see.
    """
    owners = {site.name.rpartition(".")[0] for site in sites}
    behind = dropwhile(lambda named: named[0] not in owners, network.named_modules())
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in behind
        for name, buffer in module.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
    }


def select(sites: Sequence[Site], where: Where) -> list[Site]:
    """Keeps the sites that `where` names.

    Args:
        sites: The candidates, in execution order.
        where: A glob or globs over tensor names, the number of last sites, a fraction of them
            (the last half is 0.5), or a predicate on the name; None keeps all, and so does 1.0.

    Raises:
        UnknownSiteError: If a pattern, or all of `where`, matches nothing.
    """
    names = [site.name for site in sites]
    if where is None or (isinstance(where, float) and where == 1):
        kept = set(names)
    elif not names:
        raise UnknownSiteError(
            f"where={where!r}: this method makes none of the network's tensors random, so that "
            f"there is nothing to choose from. Drop where=."
        )
    elif isinstance(where, bool) or (isinstance(where, int) and not 1 <= where <= len(names)):
        raise UnknownSiteError(
            f"where={where!r}: a number must be from 1 to {len(names)}, the number of sites. "
            f"{_listing(names)}"
        )
    elif isinstance(where, int):
        kept = set(names[-where:])
    elif isinstance(where, float):
        if not 0 < where < 1:
            raise UnknownSiteError(
                f"where={where!r}: a fraction must be above 0 and at most 1, as 0.5 for the last "
                f"half of the sites; a number of sites is a whole one. {_listing(names)}"
            )
        kept = set(names[-math.ceil(where * len(names) - 1e-9) :])
    elif callable(where):
        kept = {name for name in names if where(name)}
    else:
        patterns = [where] if isinstance(where, str) else list(where)
        matches = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
        missed = [pattern for pattern, matched in matches.items() if not matched]
        if missed:
            raise UnknownSiteError(
                f"where={where!r}: no site matches {', '.join(map(repr, missed))}. "
                f"{_listing(names)}"
            )
        kept = {name for matched in matches.values() for name in matched}
    if not kept and names:
        raise UnknownSiteError(f"where={where!r} matches no site. {_listing(names)}")
    return [site for site in sites if site.name in kept]


def in_execution_order(
    sites: Sequence[Site], network: nn.Module, run: Callable[[nn.Module], object]
) -> list[Site]:
    """Sorts sites by when their layer first runs.

    Args:
        sites: The sites of `network`.
        network: A private copy: it is run, with hooks.
        run: Runs the network on an example.
    """
    begins = first_runs(sites, network, run, count().__next__)
    return sorted(sites, key=lambda site: begins[site.name])


def first_runs(
    sites: Sequence[Site],
    network: nn.Module,
    run: Callable[[nn.Module], object],
    clock: Callable[[], float],
) -> dict[str, float]:
    """What a clock shows when each site's layer first runs, by the site's name.

    A layer that is not called, as where attention uses the weight of its projection itself, begins
    with the module around it.

    Args:
        sites: The sites of `network`.
        network: A private copy: it is run, with hooks.
        run: Runs the network on an example.
        clock: Something that does not decrease.
    """
    seen: dict[str, float] = {}

    def note(name: str) -> Callable[[nn.Module, object], None]:
        def hook(_module: nn.Module, _args: object) -> None:
            seen.setdefault(name, clock())

        return hook

    handles = [
        module.register_forward_pre_hook(note(name)) for name, module in network.named_modules()
    ]
    try:
        run(network)
    finally:
        for handle in handles:
            handle.remove()

    def begin(place: str) -> float:
        layer = place.rpartition(".")[0]
        while layer and layer not in seen:
            layer = layer.rpartition(".")[0]
        return seen[layer]

    places = slots(network)
    return {site.name: min(map(begin, places[site.name])) for site in sites}


def require_sites(sites: Sequence[Site], skipped: Sequence[Skipped], method: str) -> None:
    """Raises if a network has no site at all."""
    if sites:
        return
    why = ""
    if skipped:
        first = skipped[0]
        why = f" ({len(skipped)} were skipped, the first: {first.name or 'the network'}, a "
        why += f"{first.kind}: {first.reason})"
    raise NothingToRandomiseError(
        f"{method} makes normalisation layers random and this network has none with a learnable "
        f"scale{why}. Use a method that makes other weights random (BayesAdapter, IBNN), or a "
        f"network with BatchNorm, LayerNorm, GroupNorm, InstanceNorm or RMSNorm."
    )


def _norm_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in network.named_modules():
        named_so = any(NORM.search(parent.__name__) for parent in type(module).__mro__)
        is_container = not module._parameters and any(True for _ in module.children())
        if named_so and not is_container:
            yield name, module


def _scale(layer: nn.Module) -> tuple[str, float] | str:
    """The attribute that holds a layer's scale and its offset, or why there is none."""
    own = {
        name: parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.is_floating_point()
    }
    if not own:
        return "no learnable scale"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in own.values()):
        return "not initialised yet: run the network once before converting it"
    if type(layer).__module__.startswith("torch.nn.") and isinstance(layer, _TORCH_NORMS):
        return "weight", 0.0
    try:
        trial = copy.deepcopy(layer).to("cpu", torch.float64).eval().requires_grad_(False)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"cannot be copied to be looked at ({error})"
    for name in own:
        for offset in (0.0, 1.0):
            if _is_scale(trial, name, offset):
                return name, offset
    return "no tensor of it scales the normalised input"


def _is_scale(layer: nn.Module, name: str, offset: float) -> bool:
    scale = getattr(layer, name)
    trained = scale.clone()

    def responds(value: float, shape: tuple[int, ...]) -> bool | None:
        scale.fill_(value)
        return _depends_on_input(layer, shape)

    try:
        return any(
            responds(-offset, shape) is False and responds(2 - offset, shape) is True
            for shape in _input_shapes(trained)
        )
    finally:
        scale.copy_(trained)


def _depends_on_input(layer: nn.Module, shape: tuple[int, ...]) -> bool | None:
    """Whether the layer's output changes with its input; None if it cannot take this shape."""
    generator = torch.Generator().manual_seed(0)
    outputs: list[Tensor] = []
    with warnings.catch_warnings():  # layers warn of shapes that are unusual for them
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            try:
                outputs.append(layer(x))
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                return None
    if not all(isinstance(y, Tensor) for y in outputs):
        return None
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-7)


def _input_shapes(scale: Tensor) -> Iterable[tuple[int, ...]]:
    """Inputs a layer with this scale might take: channels first, channels last, whole."""
    yield 4, *scale.shape
    channels = scale.numel()
    yield from ((4, channels), (4, channels, 5), (4, channels, 3, 5), (4, channels, 2, 3, 5))
    yield from ((4, 5, channels), (4, 3, 5, channels))


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"The sites are: {shown}{more}."


def check_where(where: Where) -> None:
    """Raises if `where` is of none of the kinds that `select` takes."""
    if isinstance(where, str) and where == "auto":
        raise SettingError(
            "where='auto' chooses by data, of which a plan has none: use convert(model, method, "
            "where='auto', validation=loader), or `bayesify fit --where auto`, and see what it "
            "chose."
        )
    if where is None or isinstance(where, str | int | float) or callable(where):
        return
    if not isinstance(where, Iterable) or not all(isinstance(item, str) for item in where):
        raise SettingError(
            f"where={where!r} must be a glob, a list of globs, a number, a fraction or a "
            f"function of a name."
        )
