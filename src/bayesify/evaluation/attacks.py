r"""Attacks on images: small changes that raise the loss of the mean prediction most.

An attacker may change every pixel of an image by at most a radius $r$. The loss is that of what a
Bayesian network predicts, the mean over S draws, and not the mean of the draws' losses:

$$x' = \arg\max_{|x' - x|_\infty \le r} -\log \frac{1}{S} \sum_s p(y | x', w_s)$$

FGSM takes one step of length r along the gradient's sign (Goodfellow et al., *Explaining and
Harnessing Adversarial Examples*, ICLR 2015, https://arxiv.org/abs/1412.6572). PGD takes many
smaller ones and after each goes back to the nearest point within the radius and the pixels' range
(Madry et al., *Towards Deep Learning Models Resistant to Adversarial Attacks*, ICLR 2018,
https://arxiv.org/abs/1706.06083). The draws stay the same at all steps: those that
`bnn.predict(x, seed=seed)` averages.

An attack crafted on one network and tried on another is a transfer attack: `pgd(other, x, y)`.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.autograd import grad

from bayesify.batches import Inputs
from bayesify.errors import DataError, NonFiniteError, SettingError, UnsupportedNetworkError
from bayesify.evaluation.detection import detect, scores
from bayesify.evaluation.pixels import Scale
from bayesify.likelihood import Averages, Classification
from bayesify.memory import PeakMemory
from bayesify.methods import MAP
from bayesify.model import BayesianModel, convert
from bayesify.outliers import Normalisation
from bayesify.posterior import key
from bayesify.prediction import Prediction
from bayesify.sampling import MEMORY_BUDGET
from bayesify.tape import channels_last

# Measured on ResNet-20, one core: gradients at 256 images cost 15 % more an image than at 64 and,
# where draws share a trunk and fewer of them fit into memory at once, 2.5 times as much.
LARGEST_BATCH = 64


def pgd(
    bnn: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    radius: float = 8 / 255,
    step: float | None = None,
    steps: int = 20,
    draws: int | None = None,
    seed: int = 0,
    normalisation: Normalisation | None = None,
    random_start: bool = False,
    batch_size: int | None = None,
) -> Tensor:
    """Projected gradient ascent on the loss of the mean prediction, within a radius of each image.

    The result is within `radius` of `x`, in pixel units, and its pixels are between 0 and 1. No
    parameter gets a gradient and no global random state is touched.

    Args:
        bnn: What is attacked: a `BayesianModel` of any likelihood, or an ordinary classifier, which
            is copied and run in eval mode (`convert(network, MAP(), likelihood=...)` for others).
        x: Images as the network takes them, `[B, C, ...]`.
        target: What is right for them, as in training.
        radius: The largest change of a pixel, where pixels run from 0 to 1.
        step: The change of a step; 2.5 radius / steps by default.
        steps: How many steps.
        draws: Draws of a prediction.
        seed: Seed of the draws and of a random start.
        normalisation: Mean and standard deviation of each channel, by which pixels were normalised;
            None if the network takes pixels as they are.
        random_start: Starts anywhere within the radius rather than at the image.
        batch_size: Images that run at once; by default what memory allows, at most 64.

    Returns:
        The attacked images, normalised as `x` is.

    Raises:
        SettingError: If a setting is outside what is allowed.
        DataError: If images or targets cannot be used.
        UnsupportedNetworkError: If the network's output has no gradient for its input.
        NonFiniteError: If the network gives NaN.

    Example:
        >>> network = nn.Linear(2, 2, bias=False)
        >>> _ = network.weight.data.copy_(torch.eye(2))
        >>> pgd(network, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), radius=0.25)
        tensor([[0.2500, 0.7500]])
    """
    _check_settings(radius, step, steps, batch_size)
    model = bnn if isinstance(bnn, BayesianModel) else convert(bnn, MAP())
    with torch.inference_mode(False), torch.enable_grad():
        scale = Scale(x, normalisation)
        images = scale.pixels(x)
        start = images
        if random_start:
            generator = torch.Generator().manual_seed(key("attack", seed))
            noise = 2 * torch.rand(x.shape, generator=generator) - 1
            start = images + radius * noise.to(images)
        loss = _Loss(model, x[:1], draws, seed)
        target = loss.check_target(target, len(x))
        length = 2.5 * radius / steps if step is None else step
        attacked = []
        for rows in torch.arange(len(x)).split(batch_size or loss.batch_size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            low, high = (images[part] - radius).clamp(0, 1), (images[part] + radius).clamp(0, 1)
            now = start[part].clamp(low, high)
            for _ in range(steps):
                slope = loss.gradient(scale.inputs(now), target[part])
                now = (now + length * slope.sign().to(now)).clamp(low, high)
            attacked.append(scale.inputs(now))
        return torch.cat(attacked)


def fgsm(
    bnn: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    radius: float = 8 / 255,
    draws: int | None = None,
    seed: int = 0,
    normalisation: Normalisation | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """The fast gradient sign method: one step, as long as the radius. See `pgd`.

    Example:
        >>> network = nn.Linear(2, 2, bias=False)
        >>> _ = network.weight.data.copy_(torch.eye(2))
        >>> fgsm(network, torch.tensor([[0.5, 0.0]]), torch.tensor([1]), radius=0.25)
        tensor([[0.7500, 0.0000]])
    """
    return pgd(
        bnn,
        x,
        target,
        radius=radius,
        step=radius,
        steps=1,
        draws=draws,
        seed=seed,
        normalisation=normalisation,
        batch_size=batch_size,
    )


def detection(
    normal: Prediction, strange: Prediction, score: str = "epistemic"
) -> dict[str, float]:
    """How well a score tells attacked images from normal ones, attacked being what is sought.

    An image counts once: where it has many predictions (pixels, labels), their mean score counts.

    Args:
        normal: Predictions for images as they are.
        strange: Predictions for attacked images.
        score: "epistemic" (of classes, the mutual information), "uncertainty" (total), "aleatoric"
            or "confidence".

    Returns:
        The measures of `Detection` by name: `aupr` is the average precision.

    Raises:
        SettingError: If there is no such score.
        DataError: If one of the two is empty, or they are of different kinds.
    """
    if normal.kind != strange.kind:
        raise DataError(
            f"normal is a prediction of {normal.kind} and strange of {strange.kind}: compare "
            f"predictions of one network."
        )
    return asdict(detect(_image_scores(normal, score), _image_scores(strange, score)))


class _Loss:
    """NLL of the mean prediction, and its gradient for the inputs, one chunk of draws at a time.

    Args:
        bnn: What predicts.
        example: One input, by which memory is measured.
        draws: How many draws.
        seed: Which draws.
    """

    def __init__(self, bnn: BayesianModel, example: Tensor, draws: int | None, seed: int) -> None:
        bnn._require_unchanged()
        count = bnn.method.draws if draws is None else bnn.method.check_draws(draws)
        self.bnn = bnn
        with torch.no_grad():  # no parameter is in any graph
            self.drawn = bnn.draws(seed, range(count))
        self.count = count if self.drawn else 1
        first = {name: value[0] for name, value in self.drawn.items()}
        inputs = Inputs((_leaf(example.to(bnn.device)),), {})
        with PeakMemory() as memory:
            self.output = bnn.runner.plain(first, inputs)
            slope = None
            if self.output.requires_grad:
                (slope,) = grad(self.output.sum(), inputs.args, allow_unused=True)
        if slope is None:
            raise UnsupportedNetworkError(
                f"the output of {type(bnn.network).__name__} has no gradient for its input, which "
                f"an attack climbs: it runs under no_grad, detaches, or rounds. Craft the attack "
                f"on another network and try it on this one."
            )
        # The runner reckons with what a forward holds; a graph holds more.
        forward = bnn.runner.bytes_per_example(self.drawn, inputs)
        self.budget = MEMORY_BUDGET * forward // max(forward, 2 * memory.peak)
        most = bnn.runner.batch_size(self.drawn, inputs, self.budget)
        self.batch_size = min(LARGEST_BATCH, most)

    def check_target(self, target: Tensor, size: int) -> Tensor:
        """Targets of `size` examples in the likelihood's form."""
        outputs = self.output.detach().expand(size, *self.output.shape[1:])
        # A copy, since a graph cannot hold a tensor made in inference mode.
        return self.bnn.likelihood.target(target, outputs).clone()

    def gradient(self, x: Tensor, target: Tensor) -> Tensor:
        """Of each example's NLL, for that example, `[B, ...]`."""
        x = _leaf(channels_last(x.to(self.bnn.device)))
        # With one position an example, p is the example's: -log mean p needs one pass.
        alone = isinstance(self.bnn.likelihood, Classification) and target.ndim == 1
        as_drawn = self.bnn.temperature == 1 and self.bnn.slope == 0
        one_pass = as_drawn and (alone or self.count == 1)
        slope = self._in_one_pass(x, target) if one_pass else self._in_two_passes(x, target)
        if torch.isnan(slope).any():
            raise NonFiniteError(
                "the gradient of the loss for the images is NaN. Try less noise, or full precision."
            )
        return slope

    def _in_one_pass(self, x: Tensor, target: Tensor) -> Tensor:
        """-sum_s w_s grad log p_s, where w_s = p_s / sum p.

        Both sums run along as draws come, relative to the largest p so far, so that nothing
        underflows; the weights are the same for all of an example's pixels.
        """
        top = torch.full((len(x),), -math.inf, device=x.device)
        mass, total = torch.zeros_like(top), torch.zeros_like(x)
        for outputs in self._outputs(x):
            losses = torch.stack([self.bnn.likelihood.loss(output, target) for output in outputs])
            logs = -losses.detach()
            highest = torch.maximum(top, logs.amax(0))
            weights = (logs - highest).exp()
            (slope,) = grad((weights * losses).sum(), x)
            shrink = (top - highest).exp()
            total = total * _rows(shrink, x) + slope
            mass = mass * shrink + weights.sum(0)
            top = highest
        return total / _rows(mass, x)

    def _in_two_passes(self, x: Tensor, target: Tensor) -> Tensor:
        """sum_k (d NLL / d a_k) mean_s grad t_ks, for the averages a_k = mean_s t_ks.

        The averages come from a first pass without graphs, so that the NLL's slope in them is known
        when the second goes through the draws. Exact for every likelihood.
        """
        likelihood = self.bnn.likelihood
        averages: Averages = {}
        with torch.no_grad():
            for outputs in self._outputs(x):
                for name, value in likelihood.statistics(outputs).items():
                    averages[name] = averages.get(name, 0) + value.sum(0) / self.count
        leaves = {name: _leaf(value) for name, value in averages.items()}
        nll = likelihood.nll(self.bnn.pool(leaves), target).sum()
        slopes = grad(nll, list(leaves.values()), allow_unused=True)
        used = {
            name: slope for name, slope in zip(leaves, slopes, strict=True) if slope is not None
        }
        total = torch.zeros_like(x)
        for outputs in self._outputs(x):
            statistics = likelihood.statistics(outputs)
            parts = [(slope * statistics[name]).sum() for name, slope in used.items()]
            total += grad(torch.stack(parts).sum() / self.count, x)[0]
        return total

    def _outputs(self, x: Tensor) -> Iterator[Tensor]:
        """Outputs of consecutive draws, stacked, as many at a time as memory allows."""
        return self.bnn.runner.outputs(self.drawn, Inputs((x,), {}), memory_budget=self.budget)


def _check_settings(radius: float, step: float | None, steps: int, batch_size: int | None) -> None:
    if not 0 < radius <= 1:
        raise SettingError(
            f"radius={radius!r} must be above 0 and at most 1: pixels run from 0 to 1, so that 8 "
            f"of 255 grey levels are radius=8/255."
        )
    if step is not None and not 0 < step < math.inf:
        raise SettingError(f"step={step!r} must be above 0, in pixel units, or None.")
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise SettingError(f"{name}={value!r} must be a whole number, 1 or more.")


def _image_scores(prediction: Prediction, score: str) -> Tensor:
    known = scores(prediction)
    if score not in known:
        raise SettingError(f"score={score!r} must be one of {', '.join(known)}.")
    values = known[score]
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _leaf(tensor: Tensor) -> Tensor:
    """The same numbers, at which a graph begins."""
    return tensor.detach().clone().requires_grad_()


def _rows(numbers: Tensor, x: Tensor) -> Tensor:
    """One number an example, to multiply `x` by."""
    return numbers.reshape(-1, *(1 for _ in x.shape[1:]))
