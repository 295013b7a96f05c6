"""What a network's output means: its loss, and what is averaged over draws to predict.

A likelihood turns whatever the network returns into one tensor `[B, ...]` (`read`), scores it
against a target (`loss`), names the quantities of each draw whose averages make a prediction
(`statistics`), and makes it (`pool`). Stacked outputs of S draws are `[S, B, ...]`.

Draws are averaged first, and the average is tempered:

    p = (1/S sum_s p_s)^(1/T) / Z

If each draw by itself is as sure as it should be, an average of draws that disagree is less sure
than that, above all where it is half sure, and no temperature of the draws mends it: one of the
average does (Rahaman and Thiery, *Uncertainty Quantification and Deep Ensembles*, NeurIPS 2021,
https://arxiv.org/abs/2007.08792). The temperature says how much doubt there is, the draws how it is
divided: mean_s H(p_s) / H(1/S sum_s p_s) of it is aleatoric at any temperature.

What one temperature for all cannot mend, averages that are too sure where they are sure and not
sure enough elsewhere, one that depends on the doubt H in the average does (after Balanya et al.,
*Adaptive Temperature Scaling for Robust Calibration of Deep Neural Networks*, 2022,
https://arxiv.org/abs/2208.00461):

    T(H) = T (1 + H / 0.1)^slope, H in nats
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayesify.errors import DataError, SettingError

Averages = dict[str, Tensor]

LITTLE_DOUBT = 0.1  # nats: above it, the slope shows


class Likelihood(nn.Module, ABC):
    """The meaning of a network's output.

    Args:
        output: Picks the tensor out of what the network returns. By default a tensor is taken as it
            is, of a dict or object its `logits` or `out`, of a tuple the first tensor.
    """

    kind: str

    def __init__(self, output: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.output = output

    def settings(self) -> dict[str, Any]:
        """What is stored, so that the same likelihood can be made again."""
        return {}

    def read(self, output: Any) -> Tensor:
        """The network's output as one tensor `[B, ...]`, in the form the other methods take."""
        return self.output(output) if self.output else find_tensor(output)

    @abstractmethod
    def target(self, target: Any, output: Tensor) -> Tensor:
        """Checks a target against one draw's output and brings it into form.

        Raises:
            DataError: If its shape, type or range is wrong.
        """

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Negative log-likelihood of each example, `[B]`, for one draw's output `[B, ...]`.

        Args:
            output: One draw's output.
            target: Targets in form.
            weight: How much each class counts, `[C]`; only classification has classes.
        """

    @abstractmethod
    def statistics(self, outputs: Tensor) -> Averages:
        """Quantities of each draw `[S, B, ...]` whose averages over draws make the prediction."""

    @abstractmethod
    def pool(self, averages: Averages, temperature: float = 1.0, slope: float = 0.0) -> Averages:
        """The prediction that averaged statistics make, softened or sharpened.

        Args:
            averages: Of the draws' statistics.
            temperature: Softens above 1 and sharpens below.
            slope: How the temperature rises with doubt.
        """

    def mutual_information(self, outputs: Tensor) -> Tensor:  # noqa: ARG002
        """How much draws disagree about each example, in nats, `[B]`, differentiable."""
        raise SettingError(
            f"{type(self).__name__} has no mutual information to train on: training on OOD data "
            f"needs likelihood='classification', 'binary' or 'multilabel'."
        )

    @abstractmethod
    def nll(self, averages: Averages, target: Tensor) -> Tensor:
        """Negative log-likelihood of each example under the averaged prediction, `[B]`."""

    @abstractmethod
    def predictive(self, outputs: Tensor, temperature: float = 1.0, slope: float = 0.0) -> Tensor:
        """Log-probabilities or mean over draws, differentiable, `[B, ...]`."""


class Classification(Likelihood):
    """One of C classes: logits `[B, C, ...]`, targets `[B, ...]`, so segmentation too.

    Args:
        output: See `Likelihood`.
        ignore_index: Target value that does not count (void pixels).
    """

    kind = "classes"

    def __init__(
        self, output: Callable[[Any], Tensor] | None = None, ignore_index: int = -100
    ) -> None:
        super().__init__(output)
        self.ignore_index = ignore_index

    def settings(self) -> dict[str, Any]:
        """The ignored label."""
        return {"ignore_index": self.ignore_index}

    def read(self, output: Any) -> Tensor:
        """Logits, which must have a class dimension."""
        logits = super().read(output)
        if logits.ndim < 2 or logits.shape[1] < 2:
            raise DataError(
                f"classification needs logits [batch, classes, ...] with at least two classes, and "
                f"this network gives {list(logits.shape)}. Use likelihood='binary' for one logit, "
                f"'regression' for values, or Classification(output=...) to pick the logits."
            )
        return logits

    def target(self, target: Any, output: Tensor) -> Tensor:
        """Integer classes `[B, ...]`, each below C or `ignore_index`."""
        target = torch.as_tensor(target, device=output.device)
        expected = [output.shape[0], *output.shape[2:]]
        if list(target.shape) != expected:
            raise DataError(
                f"targets have shape {list(target.shape)} where {expected} goes with logits "
                f"{list(output.shape)}. Targets are class numbers, not one-hot."
            )
        if target.is_floating_point() and (target != target.round()).any():
            raise DataError("targets must be class numbers, and hold fractions.")
        target = target.long()
        counted = target[target != self.ignore_index]
        classes = output.shape[1]
        if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
            raise DataError(
                f"labels run from {int(counted.min())} to {int(counted.max())}, and the network "
                f"has {classes} classes, 0 to {classes - 1}. Check the label encoding, or set "
                f"Classification(ignore_index=...) for a void label."
            )
        return target

    def loss(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Cross-entropy, averaged over an example's counted positions."""
        logits = output.float()
        losses = functional.cross_entropy(
            logits,
            target,
            None if weight is None else weight.to(logits),
            reduction="none",
            ignore_index=self.ignore_index,
        )
        return self._example_mean(losses, target)

    def statistics(self, outputs: Tensor) -> Averages:
        """Each draw's probabilities, and their entropy."""
        log_probs = torch.log_softmax(outputs.float(), dim=2)
        probs = log_probs.exp()
        # A probability of 0 has no share in the entropy, though its logarithm is infinite.
        return {"probs": probs, "aleatoric": -(probs * log_probs.clamp_min(-1e4)).sum(2)}

    def pool(self, averages: Averages, temperature: float = 1.0, slope: float = 0.0) -> Averages:
        """See the top of this file."""
        if temperature == 1 and slope == 0:
            return averages
        before = averages["probs"]
        doubt = _entropy(before).sum(1)
        probs = (_log(before) / _hotter(temperature, slope, doubt).unsqueeze(1)).softmax(1)
        aleatoric = _rescaled(averages["aleatoric"], doubt, _entropy(probs).sum(1))
        return {"probs": probs, "aleatoric": aleatoric}

    def mutual_information(self, outputs: Tensor) -> Tensor:
        """Entropy of the mean probabilities, less the draws' mean entropy."""
        averages = {name: value.mean(0) for name, value in self.statistics(outputs).items()}
        total = _entropy(averages["probs"]).sum(1)
        return (total - averages["aleatoric"]).reshape(len(total), -1).mean(1)

    def nll(self, averages: Averages, target: Tensor) -> Tensor:
        """-log of the mean probability of the target."""
        counted = target.clamp_min(0) if self.ignore_index < 0 else target
        counted = torch.where(target == self.ignore_index, 0, counted)
        probs = averages["probs"].gather(1, counted.unsqueeze(1)).squeeze(1)
        return self._example_mean(-_log(probs), target)

    def predictive(self, outputs: Tensor, temperature: float = 1.0, slope: float = 0.0) -> Tensor:
        """Log of the mean probability, tempered."""
        logs = _log_mean(torch.log_softmax(outputs.float(), dim=2))
        if temperature == 1 and slope == 0:
            return logs
        hotter = _hotter(temperature, slope, _entropy(logs.exp()).sum(1))
        return torch.log_softmax(logs / hotter.unsqueeze(1), dim=1)

    def _example_mean(self, losses: Tensor, target: Tensor) -> Tensor:
        if losses.ndim == 1:
            return torch.where(target == self.ignore_index, 0.0, losses)
        counted = (target != self.ignore_index).flatten(1)
        return (losses.flatten(1) * counted).sum(1) / counted.sum(1).clamp_min(1)


class Binary(Classification):
    """Yes or no: one logit `[B]`, `[B, 1]` or `[B, 1, ...]`; predicted as two classes."""

    def read(self, output: Any) -> Tensor:
        """Two logits, 0 and the network's."""
        logit = Likelihood.read(self, output)
        if logit.ndim > 1:
            if logit.shape[1] != 1:
                raise DataError(
                    f"likelihood='binary' takes one logit an example, and this network gives "
                    f"{list(logit.shape)}. Use 'classification' or 'multilabel'."
                )
            logit = logit.squeeze(1)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)

    def target(self, target: Any, output: Tensor) -> Tensor:
        """Zeros and ones, of the logit's shape."""
        target = torch.as_tensor(target, device=output.device)
        if target.ndim == output.ndim and target.shape[1] == 1:
            target = target.squeeze(1)
        return super().target(target, output)


class Multilabel(Likelihood):
    """C questions of yes or no at once: logits `[B, C, ...]`, targets like them in {0, 1}."""

    kind = "labels"

    def target(self, target: Any, output: Tensor) -> Tensor:
        """Zeros and ones."""
        target = torch.as_tensor(target, device=output.device)
        if target.shape != output.shape:
            raise DataError(
                f"targets have shape {list(target.shape)} and logits {list(output.shape)}: "
                f"multilabel needs a 0 or 1 for every label."
            )
        if not ((target == 0) | (target == 1)).all():
            raise DataError("labels out of range: multilabel targets must be 0 or 1.")
        return target.float()

    def loss(
        self,
        output: Tensor,
        target: Tensor,
        weight: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Binary cross-entropy, averaged over labels."""
        losses = functional.binary_cross_entropy_with_logits(
            output.float(), target, reduction="none"
        )
        return losses.flatten(1).mean(1)

    def statistics(self, outputs: Tensor) -> Averages:
        """Each draw's probability of yes, and its entropy."""
        outputs = outputs.float()
        probs = torch.sigmoid(outputs)
        return {"probs": probs, "aleatoric": _binary_entropy(probs)}

    def pool(self, averages: Averages, temperature: float = 1.0, slope: float = 0.0) -> Averages:
        """See the top of this file: yes and no are two classes."""
        if temperature == 1 and slope == 0:
            return averages
        before = averages["probs"]
        doubt = _binary_entropy(before)
        probs = ((_log(before) - _log(1 - before)) / _hotter(temperature, slope, doubt)).sigmoid()
        aleatoric = _rescaled(averages["aleatoric"], doubt, _binary_entropy(probs))
        return {"probs": probs, "aleatoric": aleatoric}

    def mutual_information(self, outputs: Tensor) -> Tensor:
        """Of each label, averaged over labels."""
        averages = {name: value.mean(0) for name, value in self.statistics(outputs).items()}
        return (_binary_entropy(averages["probs"]) - averages["aleatoric"]).flatten(1).mean(1)

    def nll(self, averages: Averages, target: Tensor) -> Tensor:
        """Of the mean probabilities, averaged over labels."""
        probs = torch.where(target == 1, averages["probs"], 1 - averages["probs"])
        return -_log(probs).flatten(1).mean(1)

    def predictive(self, outputs: Tensor, temperature: float = 1.0, slope: float = 0.0) -> Tensor:
        """Log of the mean probability of yes, tempered."""
        yes, no = (_log_mean(functional.logsigmoid(sign * outputs.float())) for sign in (1, -1))
        doubt = _entropy(yes.exp()) + _entropy(no.exp())
        return functional.logsigmoid((yes - no) / _hotter(temperature, slope, doubt))


class Regression(Likelihood):
    """Values with Gaussian noise: a mean `[B, ...]`, or a mean and a log-variance.

    Args:
        output: See `Likelihood`; may return a tuple of mean and log-variance.
        heteroscedastic: The network itself says how noisy each value is: it returns a tuple of
            mean and log-variance, or one tensor `[B, 2 D]` of both. Otherwise one noise level is
            learned.
    """

    kind = "values"

    def __init__(
        self, output: Callable[[Any], Tensor] | None = None, *, heteroscedastic: bool = False
    ) -> None:
        super().__init__(output)
        self.heteroscedastic = heteroscedastic
        self.log_variance = None if heteroscedastic else nn.Parameter(torch.zeros(()))

    def settings(self) -> dict[str, Any]:
        """Where the noise comes from."""
        return {"heteroscedastic": self.heteroscedastic}

    def read(self, output: Any) -> Tensor:
        """Mean and log-variance, stacked `[B, 2, ...]`."""
        if self.log_variance is not None:
            mean = super().read(output)
            return torch.stack([mean, self.log_variance.expand_as(mean)], dim=1)
        output = self.output(output) if self.output else output
        if isinstance(output, tuple | list):
            return torch.stack([output[0], output[1]], dim=1)
        both = find_tensor(output)
        if both.ndim < 2 or both.shape[1] % 2:
            raise DataError(
                f"heteroscedastic regression needs a mean and a log-variance for every value, and "
                f"this network gives {list(both.shape)}."
            )
        return torch.stack(both.chunk(2, dim=1), dim=1)

    def target(self, target: Any, output: Tensor) -> Tensor:
        """Finite numbers, as many as the mean has."""
        target = torch.as_tensor(target, device=output.device)
        mean = output[:, 0]
        if target.shape[:1] != mean.shape[:1] or target.numel() != mean.numel():
            raise DataError(
                f"targets have shape {list(target.shape)} and the network's means "
                f"{list(mean.shape)}: they must agree."
            )
        if not torch.isfinite(target).all():
            raise DataError("targets hold NaN or infinite numbers. Clean or drop these examples.")
        return target.reshape(mean.shape).to(torch.get_default_dtype())

    def loss(
        self,
        output: Tensor,
        target: Tensor,
        weight: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Gaussian, averaged over an example's values."""
        mean, log_variance = output.float().unbind(1)
        return _gaussian_nll(mean, log_variance.exp(), target)

    def statistics(self, outputs: Tensor) -> Averages:
        """Each draw's mean, its square and its noise variance.

        In double precision: the variance between draws is a difference of large numbers.
        """
        mean, log_variance = outputs.double().unbind(2)
        return {"mean": mean, "square": mean.square(), "aleatoric": log_variance.exp()}

    def pool(
        self,
        averages: Averages,
        temperature: float = 1.0,
        slope: float = 0.0,  # noqa: ARG002
    ) -> Averages:
        """The temperature multiplies the noise's standard deviation; it has no slope."""
        return {**averages, "aleatoric": averages["aleatoric"] * temperature**2}

    def nll(self, averages: Averages, target: Tensor) -> Tensor:
        """Of a Gaussian with the prediction's mean and variance."""
        epistemic = (averages["square"] - averages["mean"].square()).clamp_min(0)
        return _gaussian_nll(averages["mean"], averages["aleatoric"] + epistemic, target)

    def predictive(
        self,
        outputs: Tensor,
        temperature: float = 1.0,  # noqa: ARG002
        slope: float = 0.0,  # noqa: ARG002
    ) -> Tensor:
        """The mean."""
        return outputs[:, :, 0].mean(0)


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "classification": Classification,
    "binary": Binary,
    "multilabel": Multilabel,
    "regression": Regression,
}


def as_likelihood(
    likelihood: str | Likelihood, settings: Mapping[str, Any] | None = None
) -> Likelihood:
    """A likelihood by name, or as it is.

    Raises:
        SettingError: If there is none of that name.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise SettingError(
            f"likelihood={likelihood!r} is not known. Use one of {', '.join(LIKELIHOODS)}, or a "
            f"Likelihood object."
        )
    return LIKELIHOODS[likelihood](**(settings or {}))


def find_tensor(output: Any) -> Tensor:
    """The tensor that matters in what a network returns.

    Raises:
        DataError: If it cannot be told.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    values = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list):
        tensors = [value for value in values if isinstance(value, Tensor)]
        if tensors and (len(tensors) == 1 or not isinstance(output, Mapping)):
            return tensors[0]
    raise DataError(
        f"the network returns a {type(output).__name__} and it cannot be told which tensor of it "
        f"counts. Pass a likelihood that picks it: Classification(output=lambda o: o['head'])."
    )


def _log_mean(log_probs: Tensor) -> Tensor:
    """Logarithms of the draws' mean probabilities."""
    return torch.logsumexp(log_probs, dim=0) - math.log(len(log_probs))


def _hotter(temperature: float, slope: float, doubt: Tensor) -> Tensor:
    """The temperature of averages with this much doubt, in nats."""
    return temperature * (1 + doubt / LITTLE_DOUBT) ** slope


def _rescaled(aleatoric: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The same share of the total uncertainty as before, now that this is another."""
    return aleatoric * after / before.clamp_min(torch.finfo(before.dtype).tiny)


def _binary_entropy(probs: Tensor) -> Tensor:
    return _entropy(probs) + _entropy(1 - probs)


def _entropy(probs: Tensor) -> Tensor:
    """-p log p, which is 0 at 0 and has a finite gradient there."""
    return -probs * _log(probs)


def _log(probs: Tensor) -> Tensor:
    """The logarithm, finite at 0."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _gaussian_nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    losses = 0.5 * ((target - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
