r"""Laplace: a Gaussian around the trained weights, as wide as the loss is flat there.

Daxberger et al., *Laplace Redux: Effortless Bayesian Deep Learning*, NeurIPS 2021
(https://arxiv.org/abs/2106.14806), by its authors' library, laplace-torch.

The weights $\theta$ stay where they are. With J the outputs' derivatives by the weights, $\Lambda$
the second derivative of the loss by the outputs ($diag(p) - p p^T$ for classes, $1 / \sigma^2$ for
values) and the prior $N(0, 1 / \delta)$,

$$q = N(\theta, P^{-1}), \qquad P = \sum_i J_i^T \Lambda_i J_i + \delta I$$

P is whole over the weight and bias of the last linear layer; it is diagonal where that layer is
large, and where all weights are random. laplace-torch sums the curvature of the batches, which it
gets from `curvature`, chooses $\delta$ by the marginal likelihood, and inverts P. Draws are of the
weights themselves, as in every method here, where the paper prefers a network made linear.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.errors import (
    DataError,
    MissingExtraError,
    NothingToRandomiseError,
    SettingError,
    UnsupportedNetworkError,
)
from bayesify.methods.curvature import AllWeights, LastLayer, loaders
from bayesify.methods.method import Method
from bayesify.posterior import Draws, NamedTensors, Posterior
from bayesify.sites import Site, Skipped, find_parameters, slots

if TYPE_CHECKING:
    from bayesify.likelihood import Likelihood
    from bayesify.model import BayesianModel

SUBSETS = ("last-layer", "all")
LARGEST_FULL = 10_000  # numbers whose covariance is kept whole: 400 MB


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """A Gaussian around the network's weights, computed from its curvature and not trained.

    Args:
        noise: A factor on the standard deviation.
        draws: Draws of a prediction.
        subset: "last-layer": the weight and bias of the last linear layer, with all covariances up
            to 10,000 numbers. "all": every weight, independent of each other.
        prior_precision: delta; by default the one with the largest marginal likelihood.

    Example:
        >>> sites, _ = Laplace().find(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)))
        >>> [site.name for site in sites]
        ['2.weight', '2.bias']
    """

    noise: float = 1.0
    draws: int = 20
    subset: str = "last-layer"
    prior_precision: float | None = None

    solves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.subset not in SUBSETS:
            raise SettingError(f"subset={self.subset!r} must be one of {', '.join(SUBSETS)}.")
        delta = self.prior_precision
        if delta is not None and not (isinstance(delta, int | float) and 0 < delta < math.inf):
            raise SettingError(
                f"prior_precision={delta!r} must be a finite number above 0, or None to have it "
                f"chosen by the marginal likelihood."
            )
        super().__post_init__()

    @property
    def shares_trunk(self) -> bool:
        """All layers before the last."""
        return self.subset == "last-layer"

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Weight and bias of the linear layer that is registered last, or every parameter."""
        sites, skipped = find_parameters(network)
        if self.subset == "all":
            return sites, skipped
        layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear)]
        if not layers:
            raise NothingToRandomiseError(
                "Laplace makes the last linear layer random, and this network has no linear layer. "
                "Use Laplace(subset='all'), which makes every weight random."
            )
        places = {f"{layers[-1]}.{name}".lstrip(".") for name in ("weight", "bias")}
        stands = slots(network)
        last = [site for site in sites if places.intersection(stands[site.name])]
        for site in last:
            if len(stands[site.name]) > 1:
                raise UnsupportedNetworkError(
                    f"the last linear layer, {layers[-1]}, shares a tensor with another layer "
                    f"({' = '.join(stands[site.name])}), through which it acts on the output too. "
                    f"Use Laplace(subset='all')."
                )
        return last, []

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """The network's weights, certain until the curvature is known."""
        numbers = sum(math.prod(site.shape) for site in sites)
        full = self.subset == "last-layer" and numbers <= LARGEST_FULL
        return Gaussian(sites, tensors, self.noise, full=full)

    def optimizer(self, posterior: Posterior, examples: int) -> None:  # noqa: ARG002
        """Nothing is trained; a missing library is found out before anything is done."""
        import_laplace()

    def solve(
        self,
        model: "BayesianModel",
        data: Iterable[Any],
        held: Iterable[Any],  # noqa: ARG002
    ) -> None:
        """Sums the curvature over the training data, chooses the prior and inverts.

        Raises:
            MissingExtraError: If laplace-torch is not installed.
            SettingError: If the likelihood is none that laplace-torch knows.
            DataError: If the data cannot be used.
            UnsupportedNetworkError: If something follows the last linear layer, or the network
                cannot be vectorised and all its weights are asked for.
        """
        posterior = model.posterior
        assert isinstance(posterior, Gaussian)  # noqa: S101  (made above)
        library = import_laplace()
        kind, std = _observation(model.likelihood)
        kinds = {"last-layer": LastLayer, "all": AllWeights}
        curvature = kinds[self.subset](model, dict(posterior.mean.items()))

        def approximation(structure: str) -> Any:
            # The backend that laplace-torch asks for the curvature of its module is the module.
            backend = lambda module, *_, **__: module  # noqa: E731
            return getattr(library, structure)(curvature, kind, sigma_noise=std, backend=backend)

        found = approximation("FullLaplace" if posterior.full else "DiagLaplace")
        for loader in loaders(model, curvature, data):
            found.fit(loader, override=False)
        if not found.n_data:
            raise DataError("no training example has a label that counts: all are ignored.")
        if self.prior_precision is None:
            prior = found
            if posterior.full:  # with a scalar prior, the marginal likelihood needs no more
                prior = approximation("DiagLaplace")
                prior.H = torch.linalg.eigvalsh(found.H).clamp_min(0)
                prior.mean = found.mean
            with warnings.catch_warnings():  # of how to predict, which is not asked of it
                warnings.simplefilter("ignore")
                prior.optimize_prior_precision(method="marglik", prior_structure="scalar")
            found.prior_precision = prior.prior_precision
        else:
            found.prior_precision = float(self.prior_precision)
        posterior.set_root(found.posterior_scale)


class Gaussian(Posterior):
    """The network's weights under Gaussian noise: w + noise R eps, with the covariance R R^T.

    R is 0 until it is set, so that all draws are the network itself.

    Args:
        sites: What is random.
        tensors: The network's tensors, by name: the means.
        noise: A factor on the standard deviation.
        full: Whether numbers depend on each other, over all sites; otherwise R is diagonal.
    """

    components = 1

    def __init__(
        self, sites: Sequence[Site], tensors: Mapping[str, Tensor], noise: float, *, full: bool
    ) -> None:
        super().__init__()
        self.noise = noise
        self.full = full
        means = {site.name: tensors[site.name] for site in sites}
        numbers = sum(value.numel() for value in means.values())
        self.mean = NamedTensors(means, trainable=False)
        self.root = NamedTensors(
            {n: v.new_zeros((v.numel(), numbers) if full else v.shape) for n, v in means.items()},
            trainable=False,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number an element."""
        return {name: tuple(value.shape) for name, value in self.mean.items()}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """Draws around the network's weights."""
        draws = {}
        if self.full:
            together = torch.cat([noise[name].flatten(1) for name in self.mean], dim=1)
        for name, mean in self.mean.items():
            root = self.root[name]
            if self.full:  # draw by draw: a product of matrices rounds by how many there are
                rows = [root @ row for row in together.to(root.dtype)]
                spread = torch.stack(rows).view(-1, *mean.shape)
            else:
                spread = root * noise[name].to(root.dtype)
            draws[name] = mean + self.noise * spread
        return draws

    @torch.no_grad()
    def set_root(self, root: Tensor) -> None:
        """Sets R, `[P, P]` or its diagonal `[P]`, by the sites one after another."""
        parts = root.split([value.numel() for _, value in self.mean.items()])
        for (_, own), part in zip(self.root.items(), parts, strict=True):
            own.copy_(part.reshape(own.shape))

    def tensors(self) -> dict[str, Tensor]:
        """R alone: the means are the network's weights, which are not stored."""
        return {f"root:{name}": value.detach() for name, value in self.root.items()}


def import_laplace() -> ModuleType:
    """The library laplace-torch.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        with warnings.catch_warnings():  # its dependencies use what torch calls deprecated
            warnings.simplefilter("ignore")
            import laplace
    except ImportError as error:
        raise MissingExtraError(
            "Laplace needs laplace-torch to be fitted: pip install 'bayesify[laplace]'."
        ) from error
    return laplace


def _observation(likelihood: "Likelihood") -> tuple[str, float]:
    """What laplace-torch calls a likelihood, and the standard deviation of values."""
    from bayesify.likelihood import Classification, Regression

    if isinstance(likelihood, Classification):
        return "classification", 1.0
    if isinstance(likelihood, Regression) and likelihood.log_variance is not None:
        return "regression", math.exp(likelihood.log_variance.item() / 2)
    raise SettingError(
        f"Laplace takes likelihood='classification', 'binary' or 'regression' with one noise level "
        f"for all values, and this is {type(likelihood).__name__}({likelihood.settings()})."
    )
