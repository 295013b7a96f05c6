r"""MC dropout: the dropout of training goes on when predicting.

Gal and Ghahramani, *Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep
Learning*, ICML 2016 (https://arxiv.org/abs/1506.02142).

A feature is dropped with probability p, and the others make up for it:

$$f_l = a(W_l (z_l \circ f_{l-1}) + b_l), \qquad
z = 1 + \alpha \left(\frac{m}{1 - p} - 1\right), \quad m \sim \mathrm{Bernoulli}(1 - p)$$

so that $\alpha = 1$ is dropout, $\alpha = 0$ the network, and the standard deviation of z is
$\alpha \sqrt{p / (1 - p)}$. A draw is one function for the whole data set: it has one mask for all
examples, positions and pixels, with a number for each feature or channel, and a layer that is used
twice has the same mask both times.

A network with dropout layers has masks there, each with its layer's own p. A network without has
them before its linear and convolutional layers, except the first, which takes the input itself.
Such a network never learned to do without some of its features: rates that are usual in training
can ruin it, and `calibrate` finds how much noise it bears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from torch import Tensor, nn

from bayesify.errors import NothingToRandomiseError, SettingError, UnsupportedNetworkError
from bayesify.gates import GATE, add_gate, gate_inputs, map_input, scaled
from bayesify.methods.method import Method
from bayesify.posterior import Draws, NamedTensors, Posterior
from bayesify.sites import Site, Skipped

_DROPOUT = nn.modules.dropout._DropoutNd
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


@dataclass(frozen=True, kw_only=True)
class MCDropout(Method):
    """Random masks on features: in the network's dropout layers, or put in where it has none.

    Args:
        noise: alpha, a factor on the distance of the masks from 1; 1 is dropout.
        draws: Draws of a prediction.
        rate: p where dropout is put in; the network's own layers keep theirs.
        insert: True puts dropout in and leaves the network's own off; False never puts it in; None
            does where the network has none of its own.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> [site.name for site in MCDropout().find(network)[0]]
        ['1.input_scale']
    """

    noise: float = 1.0
    draws: int = 20
    rate: float = 0.01
    insert: bool | None = None

    def __post_init__(self) -> None:
        self.check_numbers("rate")
        if not 0 < self.rate < 1:
            raise SettingError(f"rate={self.rate!r} must lie between 0 and 1.")
        if self.insert not in (None, True, False):
            raise SettingError(f"insert={self.insert!r} must be True, False or None.")
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """The dropout layers, or gates before all linear and convolutional layers but the first."""
        sites: list[Site] = []
        skipped: list[Skipped] = []
        if not self.insert:
            sites, skipped = find_dropout(network)
        if not sites and self.insert is not False:
            sites = [_Mask(**vars(site), rate=self.rate) for site in gate_inputs(network)[1:]]
        if not sites:
            raise NothingToRandomiseError(
                "MCDropout found no place for dropout: the network has no dropout layer with p "
                "between 0 and 1, and "
                + (
                    "insert=False lets none be put in. Use MCDropout()."
                    if self.insert is False
                    else "no linear or convolutional layer after the first one. Use BayesAdapter, "
                    "which makes every weight random."
                )
            )
        return sites, skipped

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """A mask for each site."""
        return Masks(sites, tensors, self.noise)


@dataclass(frozen=True)
class _Mask(Site):
    """A gate, and how likely each of its numbers is dropped."""

    rate: float = 0.0


class Masks(Posterior):
    """Dropout masks. Nothing of them is trained and nothing stored.

    Args:
        sites: The masks. Where a site names a weight, the mask multiplies the columns of that.
        tensors: The network's tensors, by name.
        noise: A factor on the distance of the masks from 1.
    """

    components = 1
    like: Tensor

    def __init__(self, sites: Sequence[Site], tensors: Mapping[str, Tensor], noise: float) -> None:
        super().__init__()
        self.noise = noise
        self._sites = [site for site in sites if isinstance(site, _Mask)]
        names = [site.weight for site in sites if site.weight is not None]
        self.weights = NamedTensors({name: tensors[name] for name in names}, trainable=False)
        like = next(value for value in tensors.values() if value.is_floating_point())
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One number a feature."""
        return {site.name: site.shape for site in self._sites}

    def forward(self, component: Tensor, noise: Mapping[str, Tensor]) -> Draws:  # noqa: ARG002
        """Keeps a feature where its standard normal number is below the quantile of 1 - p."""
        draws = {}
        for site in self._sites:
            kept = noise[site.name] < NormalDist().inv_cdf(1 - site.rate)
            mask = (1 + self.noise * (kept / (1 - site.rate) - 1)).to(self.like.dtype)
            if site.weight is None:
                draws[site.name] = mask
            else:
                draws[site.weight] = self.weights[site.weight] * mask.unsqueeze(1)
        return draws

    def tensors(self) -> dict[str, Tensor]:
        """None: the weights are the network's."""
        return {}


def find_dropout(network: nn.Module) -> tuple[list[Site], list[Skipped]]:
    """Puts a gate before every dropout layer of a private copy that drops something.

    How many features a layer gets is not known before the network runs, so each gate is as wide as
    the widest parameter of the network and its first numbers are used: of the last dimension, or of
    channels for images and for layers that drop channels. `nn.AlphaDropout` gets such a mask too.
    """
    sites: list[Site] = []
    skipped = []
    width = max((size for p in network.parameters() for size in p.shape), default=1)
    for prefix, module in network.named_modules():
        kind = type(module).__name__
        if isinstance(module, _DROPOUT) and module.p >= 1:
            skipped.append(Skipped(prefix, kind, "p = 1 drops everything"))
        elif isinstance(module, _DROPOUT) and module.p > 0:
            path = f"{prefix}." if prefix else ""
            site = add_gate(module, path, width, _drop)
            sites.append(_Mask(**vars(site), rate=module.p))
        elif getattr(module, "dropout", 0) and isinstance(
            module, nn.MultiheadAttention | nn.RNNBase
        ):
            skipped.append(Skipped(prefix, kind, "its dropout is inside and no layer of its own"))
    return sites, skipped


def _drop(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Multiplies a dropout layer's input by its gate, along features or channels."""
    gate = module.get_buffer(GATE)

    def apply(x: Tensor) -> Tensor:
        channels = x.ndim > 3 or (x.ndim > 1 and isinstance(module, _CHANNELWISE))
        dimension = 1 if channels else x.ndim - 1
        features = x.size(dimension)
        if features > len(gate):
            raise UnsupportedNetworkError(
                f"{module} gets {features} features, and no parameter of the network is wider "
                f"than {len(gate)}, so that there is no mask of this size. Use "
                f"MCDropout(insert=True), which puts dropout before linear and convolutional "
                f"layers instead."
            )
        return scaled(x, gate[:features].reshape(-1, *(1,) * (x.ndim - 1 - dimension)))

    return map_input(apply, args, kwargs)
