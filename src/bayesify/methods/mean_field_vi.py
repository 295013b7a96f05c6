r"""Mean-field variational inference from scratch, the baseline of the papers.

Blundell et al., *Weight Uncertainty in Neural Networks*, ICML 2015
(https://arxiv.org/abs/1505.05424), with a Gaussian prior and the KL in closed form:

$$-\frac{1}{B} \sum_i \log p(y_i | x_i, w_i) + \frac{1}{n} KL(N(\mu, \sigma^2) \| N(0, s^2))$$

It starts from an untrained network, so that running statistics of normalisation layers adapt. From
a checkpoint, BayesAdapter is the better choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.methods.method import Method
from bayesify.posterior import MeanField, Posterior
from bayesify.sites import Site, Skipped, find_parameters


@dataclass(frozen=True, kw_only=True)
class MeanFieldVI(Method):
    """A mean-field Gaussian over all weights, trained from scratch.

    Args:
        noise: A factor on all standard deviations.
        draws: Draws of a prediction.
        prior_std: s, the standard deviation of the prior N(0, s^2).
        log_std: The logarithm of the standard deviations starts uniform between these two.
        lr: Peak learning rate of Adam (cosine).
    """

    noise: float = 1.0
    draws: int = 20
    prior_std: float = 1.0
    log_std: tuple[float, float] = (-5.0, -5.0)
    lr: float = 1e-3

    def __post_init__(self) -> None:
        self.check_log_std("log_std")
        self.check_numbers("lr")
        self.check_numbers("prior_std", least=1e-6)
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """Every weight and bias."""
        return find_parameters(network)

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """Gaussians around the network's initial values."""
        log_std = {site.name: self.log_std for site in sites}
        return MeanField(sites, tensors, log_std, self.noise)

    @property
    def adapts_statistics(self) -> bool:
        """An untrained network has none to keep."""
        return True

    def groups(self, numbers: int) -> int:  # noqa: ARG002
        """One draw for all of a batch, the plain estimate."""
        return 1

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer:  # noqa: ARG002
        """Adam on means and standard deviations alike."""
        return torch.optim.Adam(posterior.parameters(), lr=self.lr, fused=True)

    def penalty(self, posterior: Posterior, progress: float, examples: int) -> Tensor:  # noqa: ARG002
        """The KL over n."""
        assert isinstance(posterior, MeanField)  # noqa: S101  (made above)
        return posterior.kl(self.prior_std) / examples
