r"""iBNN: random scales on the inputs of every layer, a mixture of K Gaussians.

Trinh, Kaski and Heinonen, *Scalable Bayesian Neural Networks by Layer-Wise Input Augmentation*
(https://arxiv.org/abs/2010.13498).

A layer's input is multiplied by latent variables, one a channel, before its weights U see it:

$$f_l = a(U_l (z_l \circ f_{l-1}) + b_l), \qquad
q(z) = \frac{1}{K} \sum_k N(\mu_k, \mathrm{diag}\, \sigma_k^2), \quad p(z) = N(1, s^2)$$

so W = U diag(z) is random at the cost of one number a channel. Each batch is split evenly over the
components, and every example gets S draws of its component. U, the biases and the latent
distributions train together, by

$$\frac{1}{B} \sum_i -\log p(y_i | x_i, z_i) + \frac{\beta}{n} KL(\hat q \,\|\, p)$$

with $\beta$ rising from 0 to 1 over the first two thirds. The KL of a mixture has no closed form;
$\hat q$ is the distribution of the average of one draw of each component, which is Gaussian.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesify.errors import NothingToRandomiseError
from bayesify.gates import gate_inputs
from bayesify.methods.method import Method, nesterov, weights_rate
from bayesify.posterior import Latent, Posterior
from bayesify.sites import Site, Skipped


@dataclass(frozen=True, kw_only=True)
class IBNN(Method):
    """Random scales on the inputs of every linear and convolutional layer.

    Args:
        noise: A factor on the distance of the scales from 1.
        draws: Draws of a prediction, over all components.
        components: K.
        prior_std: s, the standard deviation of the prior N(1, s^2).
        mean_std: The components' means start as N(1, mean_std^2): about 0.05 from a checkpoint,
            0.5 to 0.75 from scratch.
        std: The standard deviations start as |N(a, b^2)| of this pair.
        samples: S, draws of each example in a training step.
        bias_noise: Whether biases get random scales too.
        lr: Peak learning rate of weights and biases (a cosine); None: 0.25 % of the weights' root
            mean square.
        latent_lr: Learning rate of the latent distributions, a quarter of it at the end.
        weight_decay: Of weights and biases.
        adapt_statistics: Whether running statistics of normalisation layers follow the training
            images.
        scratch: Whether the network is untrained: then all of its parameters train, by SGD with
            Nesterov momentum 0.9 instead of Adam, which wants other rates (1e-2 and 0.2, for
            instance), and statistics adapt in any case.
    """

    noise: float = 1.0
    draws: int = 20
    components: int = 4
    prior_std: float = 0.1
    mean_std: float = 0.05
    std: tuple[float, float] = (0.05, 0.02)
    samples: int = 1
    bias_noise: bool = False
    lr: float | None = None
    latent_lr: float = 1e-3
    weight_decay: float = 5e-4
    adapt_statistics: bool = True
    scratch: bool = False

    epochs: ClassVar[int] = 2
    validations: ClassVar[int] = 1  # at the end: while the rate is high, all weights still move

    def __post_init__(self) -> None:
        self.check_pair("std")
        self.check_count("components")
        self.check_count("samples")
        self.check_numbers("mean_std", "latent_lr", "weight_decay")
        if self.lr is not None:
            self.check_numbers("lr")
        self.check_numbers("prior_std", least=1e-6)
        super().__post_init__()

    def find(self, network: nn.Module) -> tuple[list[Site], list[Skipped]]:
        """A gate before every linear and convolutional layer."""
        sites = gate_inputs(network, biases=self.bias_noise)
        if not sites:
            raise NothingToRandomiseError(
                "iBNN scales the inputs of linear and convolutional layers, and this network has "
                "none. Use BayesAdapter, which makes every weight random."
            )
        return sites, []

    def posterior(self, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> Posterior:
        """K components around 1, and the weights of the layers they scale."""
        owners = {site.name.rpartition(".")[0] for site in sites}
        scaled = {site.weight for site in sites}
        trained = [
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            if self.scratch or name in scaled or name.rpartition(".")[0] in owners
        ]
        return Latent(
            sites,
            tensors,
            trained,
            components=self.components,
            mean_std=self.mean_std,
            std=self.std,
            noise=self.noise,
        )

    @property
    def adapts_statistics(self) -> bool:
        """If asked to; from scratch, there are none to keep."""
        return self.adapt_statistics or self.scratch

    def optimizer(self, posterior: Posterior, examples: int) -> torch.optim.Optimizer:  # noqa: ARG002
        """Weights slowly, with weight decay; the latent distributions faster, without."""
        assert isinstance(posterior, Latent)  # noqa: S101  (made above)
        latent = [*posterior.mean.parameters(), *posterior.rho.parameters()]
        weights = list(posterior.weights.parameters())
        lr = weights_rate(weights) if self.lr is None else self.lr
        groups = [
            {"params": weights, "lr": lr, "weight_decay": self.weight_decay},
            {"params": latent, "lr": self.latent_lr},
        ]
        if self.scratch:
            return nesterov(groups)
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)

    def rates(self, progress: float) -> Sequence[float]:
        """A cosine for the weights; the latent rate falls to a quarter in the middle third."""
        return [*super().rates(progress), 1 - 0.75 * min(1.0, max(0.0, 3 * progress - 1))]

    def groups(self, numbers: int) -> int | None:  # noqa: ARG002
        """A draw for each example; from scratch, where batches need statistics, a component."""
        return self.components if self.scratch else None

    def rounds(self) -> int:
        """One for each of the S draws."""
        return self.samples

    @property
    def round_weight(self) -> float:
        """The draws' mean counts."""
        return 1 / self.samples

    @property
    def slices(self) -> int:
        """Every component gets its part of a batch."""
        return self.components

    def component(self, turn: int, count: int) -> Tensor:  # noqa: ARG002
        """Even slices of the batch, one for each component."""
        return torch.arange(count) * self.components // count

    def penalty(self, posterior: Posterior, progress: float, examples: int) -> Tensor:
        """The KL over n, times beta."""
        assert isinstance(posterior, Latent)  # noqa: S101  (made above)
        return min(1.0, 1.5 * progress) / examples * posterior.kl(self.prior_std)
