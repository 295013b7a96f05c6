r"""BayesAdapter: a trained network's weights become the means of Gaussians, and train on.

Deng et al., *BayesAdapter: Being Bayesian, Inexpensively and Reliably, via Bayesian Fine-tuning*
(https://arxiv.org/abs/2010.01979).

Every weight is $w = \mu + \exp(\psi) \epsilon$ with $\mu$ from the checkpoint. With the prior
$N(0, \sigma_0^2)$ and n examples, the gradients of KL / n are added to those of the mean loss by
the optimizer and never computed by autograd, $\lambda = 1 / (\sigma_0^2 n)$:

$$\nabla \mu \mathrel{+}= \lambda \mu, \qquad
\nabla \psi \mathrel{+}= \lambda \exp(2 \psi) - 1 / n$$

Every example of a batch gets a draw of its own (exemplar reparameterisation), or a group of
examples one together where that is too dear. On outliers $x'$, inputs on which the network should
be unsure, the mutual information of two draws is pushed up to a margin $\gamma$:

$$\max(0, \gamma - I(x')), \qquad I = H(\bar p) - \overline{H(p)} \le \log 2$$

Outliers are training images under uniform noise (`ood_radius`), data of the user's
(`fit(ood=...)`), or both. With neither, this is the paper's "BayesAdapter-".

Two things are not in the paper, and off by default. Where draws are sure and agree, I has no
gradient: a last layer that starts with large standard deviations (`head_log_std`) makes draws
disagree wherever features do not stand clear of its noise. And noise can be turned against the
network by a few gradient steps (`ood_steps`), as an attack would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.errors import SettingError
from bayesify.methods.method import Method, nesterov, weights_rate
from bayesify.posterior import MeanField, Posterior
from bayesify.sites import Site, Skipped, find_parameters

# Random numbers of a draw beyond which a draw for each example costs more than it wins.
LARGE = 1_000_000
GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class BayesAdapter(Method):
    """A mean-field Gaussian over all weights, fine-tuned from the checkpoint.

    Args:
        noise: A factor on all standard deviations.
        draws: Draws of a prediction.
        log_std: psi starts uniform between these two.
        head_log_std: psi of the last weight matrix starts between these instead; None: as all.
        weight_decay: lambda, one over the prior's variance times n.
        margin: gamma, in nats; two draws can disagree by log 2 = 0.693 at most.
        ood_weight: How much the loss on outliers counts.
        ood_radius: Uniform noise, in pixel units, that makes outliers of training images; 0: none.
        ood_steps: Most gradient steps that turn this noise against the network as it is.
        lr: Peak learning rate of mu (a cosine); None: 0.25 % of the weights' root mean square.
        psi_lr: Learning rate of psi, a fifth of it from each quarter of the fit to the next.
        adapt_statistics: Whether running statistics of normalisation layers follow the training
            images. Where there are any a batch has one draw, unless `fit(groups=...)` says
            otherwise.
        adam: Trains by Adam; otherwise by SGD with Nesterov momentum 0.9, as the paper does, which
            wants other rates: 1e-4 and 0.1, for instance.

    Example:
        >>> BayesAdapter(draws=8).groups(272_000) is None  # a draw for each example
        True
        >>> BayesAdapter(draws=8).groups(11_000_000)
        4
    """

    noise: float = 1.0
    draws: int = 20
    log_std: tuple[float, float] = (-6.0, -5.0)
    head_log_std: tuple[float, float] | None = None
    weight_decay: float = 2e-4
    margin: float = 0.75
    ood_weight: float = 1.0
    ood_radius: float = 0.0
    ood_steps: int = 0
    lr: float | None = None
    psi_lr: float = 1e-3
    adapt_statistics: bool = True
    adam: bool = True

    epochs: ClassVar[int] = 2
    validations: ClassVar[int] = 1  # at the end: while the rate is high, all weights still move
    takes_ood: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_log_std("log_std")
        if self.head_log_std is not None:
            self.check_log_std("head_log_std")
        self.check_count("ood_steps", least=0)
        self.check_numbers("weight_decay", "margin", "ood_weight", "ood_radius", "psi_lr")
        if self.lr is not None:
            self.check_numbers("lr")
        if self.ood_steps and not self.ood_radius:
            raise SettingError(
                f"ood_steps={self.ood_steps} turns noise against the network, and ood_radius=0 is "
                f"none. Set ood_radius as well, 8/255 for instance."
            )
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Every weight and bias."""
        return find_parameters(network)

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """N(mu, exp(2 psi)), mu at the checkpoint's values."""
        log_std = {site.name: self.log_std for site in sites}
        if self.head_log_std is not None:
            matrices = [site.name for site in sites if len(site.shape) > 1]
            log_std[(matrices or list(log_std))[-1]] = self.head_log_std
        return MeanField(sites, tensors, log_std, self.noise)

    @property
    def adapts_statistics(self) -> bool:
        """If asked to."""
        return self.adapt_statistics

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer:
        """Means and psi at rates of their own, with the KL's gradients built in."""
        assert isinstance(posterior, MeanField)  # noqa: S101  (made above)
        means = list(posterior.mean.parameters())
        groups = [
            {"params": means, "lr": weights_rate(means) if self.lr is None else self.lr},
            {"params": list(posterior.log_std.parameters()), "lr": self.psi_lr},
        ]
        optimizer = torch.optim.Adam(groups, fused=True) if self.adam else nesterov(groups)
        return with_kl_gradients(optimizer, posterior, self.weight_decay, examples)

    def rates(self, progress: float) -> Sequence[float]:
        """A cosine for mu; three drops to a fifth for psi."""
        return [*super().rates(progress), 0.2 ** int(4 * progress)]

    def groups(self, numbers: int) -> int | None:
        """A draw for each example of small networks; four draws a batch for large ones."""
        return None if numbers <= LARGE else GROUPS

    def noise_radius(self) -> float:
        """The noise around training images."""
        return self.ood_radius

    def noise_steps(self) -> int:
        """How far it is turned against the network."""
        return self.ood_steps

    def ood_loss(self, mutual_information: Tensor) -> Tensor:
        """How far an outlier's mutual information is below the margin."""
        return self.ood_weight * torch.relu(self.margin - mutual_information)


def with_kl_gradients(
    optimizer: torch.optim.Optimizer, posterior: MeanField, weight_decay: float, examples: int
) -> torch.optim.Optimizer:
    """Makes an optimizer add the gradients of KL / n before each of its steps.

    Weight decay on mu and exponential weight decay on psi: once a step, however many backward
    passes it has, and after gradients are unscaled in mixed precision. Works with any optimizer.

    Args:
        optimizer: It trains the posterior's parameters.
        posterior: A mean-field Gaussian.
        weight_decay: lambda = 1 / (prior variance times n).
        examples: n.
    """

    @torch.no_grad()
    def add(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for mean in posterior.mean.parameters():
            if mean.grad is not None:
                mean.grad.add_(mean, alpha=weight_decay)
        for psi in posterior.log_std.parameters():
            if psi.grad is not None:
                psi.grad.add_((2 * psi).exp(), alpha=weight_decay).sub_(1 / examples)

    optimizer.register_step_pre_hook(add)
    return optimizer
