"""Saving and loading: a folder with the posterior's tensors and a JSON that says what they are."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.choice import Choice
from bayesify.errors import BayesifyError, CorruptFileError, SettingError, WrongNetworkError
from bayesify.files import (
    matches,
    read_json,
    read_tensors,
    recovered_folder,
    replaced_folder,
    write_json,
    write_tensors,
)
from bayesify.likelihood import LIKELIHOODS, Likelihood, as_likelihood
from bayesify.methods import make_method, method_name
from bayesify.model import BayesianModel, convert

FORMAT = 1
TENSORS = "posterior.safetensors"
DESCRIPTION = "bayesify.json"


def save(model: BayesianModel, path: str | Path) -> None:
    """Writes a Bayesian network into the folder `path`, without the network's own weights.

    The folder is replaced whole or not at all; another folder that is not one of bayesify's is not
    touched.
    """
    path = Path(path)
    require_free(path)
    description = {
        "format": FORMAT,
        "method": {"name": method_name(model.method), "settings": model.method.to_dict()},
        "likelihood": _describe(model.likelihood),
        "sites": [site.name for site in model.sites],
        "choice": None if model.choice is None else asdict(model.choice),
        "noise": model.noise,
        "temperature": model.temperature,
        "slope": model.slope,
        "mirrored": model.mirrored,
        "network": {
            "class": type(model.network).__name__,
            "tensors": _shapes(model.network),
            "fingerprint": model.fingerprint(),
        },
    }
    with replaced_folder(path) as folder:
        write_tensors(folder / TENSORS, _tensors(model))
        write_json(folder / DESCRIPTION, description)


def require_free(path: Path) -> None:
    """Raises if `save` would not write into the folder `path`."""
    if path.exists() and not (path / DESCRIPTION).exists() and not _is_empty_folder(path):
        raise SettingError(f"{path} exists and is not one of bayesify's folders: name another one.")


def load(
    path: str | Path, model: nn.Module, *, likelihood: str | Likelihood | None = None
) -> BayesianModel:
    """Loads a Bayesian network that `save` wrote, onto the network it was made from.

    Args:
        path: The folder.
        model: The network, with the same weights. It is left as it is.
        likelihood: Needed if it was saved with a likelihood of your own; otherwise as it was saved.

    Raises:
        CorruptFileError: If a file is missing, truncated, damaged or not one of bayesify's.
        WrongNetworkError: If it belongs to another network, or to other weights.
    """
    path = recovered_folder(Path(path))
    if not path.is_dir():
        raise CorruptFileError(f"{path} is not a folder that bayesify saved.")
    description = read_json(path / DESCRIPTION)
    try:
        if description["format"] != FORMAT:
            raise CorruptFileError(
                f"{path} has format {description['format']!r} and this version of bayesify reads "
                f"{FORMAT}. Update bayesify."
            )
        network, sites = description["network"], list(description["sites"])
        noise, temperature = float(description["noise"]), float(description["temperature"])
        if not 0 < temperature < float("inf"):
            raise CorruptFileError(f"{path / DESCRIPTION} has a temperature of {temperature}.")
        slope = float(description.get("slope", 0.0))
        if not math.isfinite(slope):
            raise CorruptFileError(f"{path / DESCRIPTION} has a slope of {slope}.")
        mirrored = bool(description.get("mirrored", False))
        choice = Choice.from_dict(chosen) if (chosen := description.get("choice")) else None
        method = make_method(description["method"]["name"], description["method"]["settings"])
        meaning = _likelihood(description["likelihood"], likelihood)
    except BayesifyError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptFileError(
            f"{path / DESCRIPTION} is not one of bayesify's files: {error!r}."
        ) from error
    _require_same_shapes(network.get("tensors"), model, path)
    loaded = convert(model, method, likelihood=meaning, where=sites or None)
    if loaded.fingerprint() != network.get("fingerprint"):
        raise WrongNetworkError(
            f"{path} was made from a {network.get('class')} with other weights: all shapes agree, "
            f"the values do not. Load the checkpoint it was made from."
        )
    tensors, _ = read_tensors(path / TENSORS)
    matches(tensors, _tensors(loaded), path / TENSORS)
    with torch.no_grad():
        for name, parameter in _tensors(loaded).items():
            parameter.copy_(tensors[name])
    loaded.noise = noise
    loaded.temperature, loaded.slope = temperature, slope
    loaded.mirrored = mirrored
    loaded.choice = choice
    return loaded


def _tensors(model: BayesianModel) -> dict[str, Tensor]:
    own = {f"likelihood:{n}": p.detach() for n, p in model.likelihood.named_parameters()}
    return {**model.posterior.tensors(), **own}


def _shapes(network: nn.Module) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in network.state_dict().items()}


def _describe(likelihood: Likelihood) -> dict[str, Any]:
    names = {kind: name for name, kind in LIKELIHOODS.items()}
    if likelihood.output is not None or type(likelihood) not in names:
        return {"name": "custom", "settings": {}}
    return {"name": names[type(likelihood)], "settings": likelihood.settings()}


def _likelihood(stored: dict[str, Any], given: str | Likelihood | None) -> Likelihood:
    if given is not None:
        return as_likelihood(given)
    if stored["name"] == "custom":
        raise SettingError(
            "this was saved with a likelihood of your own, which JSON cannot hold: pass it again, "
            "load(path, model, likelihood=...)."
        )
    return as_likelihood(stored["name"], stored["settings"])


def _require_same_shapes(stored: Any, model: nn.Module, path: Path) -> None:
    if not isinstance(stored, dict):
        raise CorruptFileError(f"{path / DESCRIPTION} does not say which network it belongs to.")
    found = _shapes(model)
    for name in (*stored, *found):
        if stored.get(name) != found.get(name):
            raise WrongNetworkError(
                f"{path} belongs to another network: tensor {name!r} has shape "
                f"{stored.get(name, 'none')} there and {found.get(name, 'none')} in this "
                f"{type(model).__name__}. Build the network it was made from."
            )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
