"""The units of work: what there is to do, in the order in which it is worth doing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bayesify import MAP, Method, Mixture
from benchmarks.quality.settings import (
    ABLATION_FIT,
    ABLATIONS,
    ATTACKED_ABLATIONS,
    FIT,
    METHODS,
    PEERS,
    SHARDS,
    TRANSFER,
    TRANSFER_FIT,
    Size,
)

CALIBRATED = ("calibrated-0", "calibrated-1")
ATTACKS = tuple(f"pgd-{shard}" for shard in range(SHARDS))
EXTRAS = ("draws", "people", "rotation", "fgsm", "corruption", *ATTACKS)


@dataclass(frozen=True)
class Unit:
    """One piece of work, at most some 20 minutes long, with a file of its own."""

    network: str
    method: str
    seed: int
    what: str

    @property
    def name(self) -> str:
        return f"{self.network}/{self.method}/seed{self.seed}/{self.what}"


def units(size: Size) -> list[Unit]:
    """All of them: the headline seed by seed, then peers, then the rest."""
    first, network = size.seeds[0], size.networks[0]
    found = [
        Unit(name, method, seed, what)
        for seed in size.seeds
        for name in size.networks
        for method in METHODS
        for what in _headline(method, seed, first)
    ]
    found += [Unit(name, peer, first, "peer") for name in size.networks for peer in PEERS]
    found += [Unit(network, method, first, what) for what in EXTRAS for method in METHODS]
    for name in size.ablations:
        found.append(Unit(network, name, first, "ablation"))
        if name.startswith(ATTACKED_ABLATIONS):
            found.append(Unit(network, name, first, ATTACKS[0]))
    found += [Unit(TRANSFER, method, first, "transfer") for method in METHODS]
    return found


def _headline(method: str, seed: int, first: int) -> Iterator[str]:
    if type(METHODS[method]) is MAP:
        if seed == first:  # nothing is fitted or random; calibrated, it is Temperature
            yield "train-only"
        return
    yield from ("fit", "train-only")
    if seed == first or isinstance(METHODS[method], Mixture):  # whose bar is a mean of seeds
        yield from CALIBRATED


def chosen(found: Iterable[Unit], patterns: Iterable[str]) -> list[Unit]:
    """Units whose name fits one of the patterns; all, if there is none."""
    wanted = list(patterns) or ["*"]
    return [unit for unit in found if any(fnmatchcase(unit.name, pattern) for pattern in wanted)]


def asked(unit: Unit, size: Size) -> dict[str, Any]:
    """What a result depends on: with other settings it has to be made again."""
    images = size.images(unit.method)
    if unit.method in PEERS:
        return {"peer": PEERS[unit.method], "images": images}
    method = {**METHODS, **ABLATIONS}[unit.method]
    fit = fit_settings(unit)
    about = {"method": repr(method), "epochs": passes(method), "fit": fit, "images": images}
    if method.draws > 1:
        about |= {"mirrored": "if likelier", "tempered": "the average"}
    if unit.what in CALIBRATED:  # which chooses the temperature again
        about |= {"temperature": "by doubt"} if method.tempers_by_doubt else {}
    elif type(method) is not MAP:
        about |= {"temperature": "by what the network knows"}
    return about


def fit_settings(unit: Unit) -> dict[str, Any]:
    """What `fit` is asked for."""
    if unit.what == "transfer":
        return TRANSFER_FIT
    return ABLATION_FIT if unit.method in ABLATIONS else FIT


def passes(method: Method) -> list[int]:
    """How often a fit goes over the data, unless told: of each part, where there are some."""
    return [part.epochs for part in (method.parts if isinstance(method, Mixture) else [method])]
