"""The methods, one file each. A new one is a file here and a line in `METHODS`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bayesify.errors import SettingError
from bayesify.methods.abnn import ABNN
from bayesify.methods.augmentation import TestTimeAugmentation
from bayesify.methods.bayes_adapter import BayesAdapter
from bayesify.methods.dropout import MCDropout
from bayesify.methods.ensemble import DeepEnsemble
from bayesify.methods.ibnn import IBNN
from bayesify.methods.laplace import Laplace
from bayesify.methods.mean_field_vi import MeanFieldVI
from bayesify.methods.method import Method
from bayesify.methods.mixture import Mixture
from bayesify.methods.network import MAP, Temperature
from bayesify.methods.swag import SWAG

METHODS: dict[str, type[Method]] = {
    "abnn": ABNN,
    "bayes-adapter": BayesAdapter,
    "ibnn": IBNN,
    "mixture": Mixture,
    "map": MAP,
    "temperature": Temperature,
    "mean-field-vi": MeanFieldVI,
    "deep-ensemble": DeepEnsemble,
    "swag": SWAG,
    "laplace": Laplace,
    "mc-dropout": MCDropout,
    "test-time-augmentation": TestTimeAugmentation,
}

__all__ = [
    "ABNN",
    "IBNN",
    "MAP",
    "METHODS",
    "SWAG",
    "BayesAdapter",
    "DeepEnsemble",
    "Laplace",
    "MCDropout",
    "MeanFieldVI",
    "Method",
    "Mixture",
    "Temperature",
    "TestTimeAugmentation",
    "make_method",
]


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """A method from its name and settings, as files and the command line have them.

    Raises:
        SettingError: If there is no such method or setting.
    """
    if name not in METHODS:
        raise SettingError(f"method {name!r} is not known. The methods are: {', '.join(METHODS)}.")
    known = [field.name for field in fields(METHODS[name])]
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        raise SettingError(
            f"{name} has no setting {unknown[0]!r}. Its settings are: {', '.join(known)}."
        )
    return METHODS[name](**settings)


def method_name(method: Method) -> str:
    """The name under which a method is listed.

    Raises:
        SettingError: If it is not.
    """
    for name, kind in METHODS.items():
        if kind is type(method):
            return name
    own = type(method).__name__
    raise SettingError(
        f"{own} is not listed in bayesify.methods.METHODS, and could not be loaded again: list it "
        f"there under a name, METHODS['my-method'] = {own}."
    )
