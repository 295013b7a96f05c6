"""bayesify makes a trained PyTorch network Bayesian, without retraining it."""

from bayesify.choice import Choice
from bayesify.compare import compare
from bayesify.errors import (
    BayesifyError,
    BayesifyWarning,
    CorruptFileError,
    DataError,
    MissingExtraError,
    NonFiniteError,
    NothingToRandomiseError,
    SettingError,
    UnknownSiteError,
    UnsupportedNetworkError,
    WrongNetworkError,
)
from bayesify.evaluation.comparison import Comparison
from bayesify.io import load
from bayesify.likelihood import Binary, Classification, Likelihood, Multilabel, Regression
from bayesify.methods import (
    ABNN,
    IBNN,
    MAP,
    SWAG,
    BayesAdapter,
    DeepEnsemble,
    Laplace,
    MCDropout,
    MeanFieldVI,
    Method,
    Mixture,
    Temperature,
    TestTimeAugmentation,
)
from bayesify.model import BayesianModel, convert
from bayesify.plan import Plan, plan
from bayesify.prediction import Prediction

__version__ = "0.1.0"

__all__ = [
    "ABNN",
    "IBNN",
    "MAP",
    "SWAG",
    "BayesAdapter",
    "BayesianModel",
    "BayesifyError",
    "BayesifyWarning",
    "Binary",
    "Choice",
    "Classification",
    "Comparison",
    "CorruptFileError",
    "DataError",
    "DeepEnsemble",
    "Laplace",
    "Likelihood",
    "MCDropout",
    "MeanFieldVI",
    "Method",
    "MissingExtraError",
    "Mixture",
    "Multilabel",
    "NonFiniteError",
    "NothingToRandomiseError",
    "Plan",
    "Prediction",
    "Regression",
    "SettingError",
    "Temperature",
    "TestTimeAugmentation",
    "UnknownSiteError",
    "UnsupportedNetworkError",
    "WrongNetworkError",
    "compare",
    "convert",
    "load",
    "plan",
]
