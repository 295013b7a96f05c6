r"""Mean and variance of a posterior, tensor by tensor, as numbers and as pictures.

A draw of a component k is $m_k + s_k \epsilon$ where noise is added number by number. The mean of
the mixture is then that of the $m_k$, and its variance $E[s_k^2] + Var[m_k]$: what a component has
within it, and what divides the components. The BayesAdapter paper's figure 7 shows both of a first
convolution.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.errors import UnknownSiteError
from bayesify.evaluation.checks import count
from bayesify.evaluation.plots import caption, new_figure
from bayesify.posterior import Draws, Latent, MeanField, Members, Posterior
from bayesify.sites import Site, Where, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bayesify.model import BayesianModel

DRAWS = 64
CHANNELS = 16  # of a layer's inputs and outputs, where each pair has a picture
PICTURES = 256  # of a tensor


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a random tensor.

    Args:
        mean: Of each of its numbers.
        variance: Of each of its numbers.
        draws: How many draws they were computed from; None if they are exact.
    """

    mean: Tensor
    variance: Tensor
    draws: int | None


def moments(
    model: "BayesianModel", where: Where = None, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Moments]:
    """Mean and variance of the tensors that a posterior puts in place of the network's.

    They are exact for mixtures of members, mean-field Gaussians and latent scales, and for a
    posterior without random numbers; of others, the moments of some draws.

    Args:
        model: Any Bayesian network, trained or not.
        where: Which tensors: as of `convert`; all by default.
        draws: Draws, where there is no closed form.
        seed: Seed of the draws.

    Raises:
        UnknownSiteError: If `where` matches nothing, or nothing is random.

    Example:
        >>> from bayesify import BayesAdapter, convert
        >>> bnn = convert(torch.nn.Linear(2, 3), BayesAdapter(log_std=(-5.0, -5.0)))
        >>> found = moments(bnn, "weight")["weight"]
        >>> bool((found.variance.log() + 10).abs().max() < 1e-5)
        True
    """
    count("draws", draws, 2)
    posterior = model.posterior
    with torch.no_grad():
        first = posterior.draws(seed, [0])
        sites = [Site(name, tuple(value.shape[1:]), "") for name, value in first.items()]
        names = [site.name for site in select(sites, where)]
        if not names:
            raise UnknownSiteError(
                f"{type(model.method).__name__} makes no tensor of the network random: there is no "
                f"mean and no variance to show."
            )
        if isinstance(posterior, Members | MeanField | Latent) or not posterior.shapes():
            return _exact(posterior, names, model.device)
        return _of_draws(posterior, names, seed, draws)


def posterior_pictures(
    model: "BayesianModel",
    where: Where,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    title: str = "What the weights are, and how sure that is",
) -> "Figure":
    """Mean and variance of random tensors as images, side by side, a row a tensor.

    A convolution is a grid of its kernels: in colour, one for each output channel, where it takes
    three channels; otherwise a row for each of the first 16 output channels and a column for each
    of the first 16 input channels. A matrix is one image, and a vector is a grid of its numbers.

    Args:
        model: Any Bayesian network, trained or not.
        where: Which tensors: a glob or globs over their names, the number of the last ones, or a
            predicate on the name.
        draws: Draws, where mean and variance have no closed form.
        seed: Seed of the draws.
        title: The heading.

    Raises:
        UnknownSiteError: If `where` matches nothing, or nothing is random.

    Example:
        >>> from bayesify import BayesAdapter, convert
        >>> bnn = convert(torch.nn.Conv2d(3, 16, 5), BayesAdapter())
        >>> figure = posterior_pictures(bnn, "weight")
    """
    found = moments(model, where, draws=draws, seed=seed)
    heights = [_height(_Pictures.of(each.mean)) for each in found.values()]
    figure = new_figure(8.4, 1.2 + sum(heights))
    grid = figure.subplots(len(found), 2, squeeze=False, height_ratios=heights)
    for row, (name, each) in zip(grid, found.items(), strict=True):
        _tensor(row[0], each.mean, f"{name}: mean", signed=True)
        _tensor(row[1], each.variance, f"{name}: variance", signed=False)
    exact = all(each.draws is None for each in found.values())
    figure.suptitle(title)
    caption(
        figure,
        f"{type(model.method).__name__}, noise {model.noise:g}, "
        f"{'in closed form' if exact else f'over {draws} draws'}. Left: what a number is on "
        f"average. Right: how far draws of it\nvary around that, in squares of its unit. Every "
        f"panel has a scale of its own; in colour, it is that of red, green and blue each.",
    )
    return figure


def _exact(posterior: Posterior, names: list[str], device: torch.device) -> dict[str, Moments]:
    """Moments of a mixture, of posteriors whose draws are affine in noise, number by number."""
    precise = copy.deepcopy(posterior).double()  # what is small is a difference of what is not
    component = torch.arange(posterior.components, device=device)

    def draw(noise: float) -> Draws:
        shapes = posterior.shapes().items()
        same = {
            name: torch.full((len(component), *shape), noise, dtype=torch.float64, device=device)
            for name, shape in shapes
        }
        drawn: Draws = precise(component, same)
        return {name: drawn[name] for name in names}

    mean = draw(0.0)
    std = {name: far - mean[name] for name, far in draw(1.0).items()}
    return {
        name: Moments(
            mean[name].mean(0),
            std[name].square().mean(0) + mean[name].var(0, correction=0),
            None,
        )
        for name in names
    }


def _of_draws(posterior: Posterior, names: list[str], seed: int, draws: int) -> dict[str, Moments]:
    mean = dict.fromkeys(names, torch.zeros(()))
    spread = dict(mean)
    for index in range(draws):
        drawn = posterior.draws(seed, [index])
        for name in names:
            # Welford's sums: no draw is kept, and nothing large cancels.
            value = drawn[name][0].double()
            off = value - mean[name]
            mean[name] = mean[name] + off / (index + 1)
            spread[name] = spread[name] + off * (value - mean[name])
    # Draws come in opposite pairs, whose mean costs no degree of freedom.
    return {name: Moments(mean[name], spread[name] / draws, draws) for name in names}


@dataclass(frozen=True)
class _Pictures:
    """A tensor as images.

    Args:
        images: `[N, h, w]`, or `[N, h, w, 3]` in colour.
        columns: How many stand in a row.
        across: What stands side by side.
        down: What stands below each other.
    """

    images: Tensor
    columns: int
    across: str
    down: str

    @classmethod
    def of(cls, tensor: Tensor) -> "_Pictures":
        if tensor.ndim == 2:
            return cls(tensor.unsqueeze(0), 1, "input", "output")
        whole = tensor.reshape(-1, 1, 1, 1) if tensor.ndim < 2 else tensor
        kernels = whole.reshape(*whole.shape[:2], -1, whole.shape[-1])
        if kernels.shape[1] not in (1, 3) or tensor.ndim == 3:
            block = kernels[:CHANNELS, :CHANNELS]
            across = _of_all("input channel", block.shape[1], kernels.shape[1])
            down = _of_all("output channel", len(block), len(kernels))
            return cls(block.flatten(0, 1), block.shape[1], across, down)
        shown = kernels[:PICTURES].movedim(1, -1)
        shown = shown if shown.shape[-1] == 3 else shown.squeeze(-1)
        what = "number" if tensor.ndim < 2 else "output channel"
        across = f"{_of_all(what, len(shown), len(kernels))}, row by row"
        return cls(shown, math.ceil(math.sqrt(len(shown))), across, "")

    def mosaic(self) -> Tensor:
        """All in one, with gaps of one pixel, which are empty, or white in colour."""
        count, height, width, *colours = self.images.shape
        rows = math.ceil(count / self.columns)
        gap = int(height * width > 1)
        empty = 1.0 if colours else math.nan
        sheet = self.images.new_full(
            (rows * self.columns, height + gap, width + gap, *colours), empty
        )
        sheet[:count, :height, :width] = self.images
        lines = sheet.unflatten(0, (rows, self.columns)).transpose(1, 2)
        whole = lines.flatten(2, 3).flatten(0, 1)
        return whole[: len(whole) - gap, : whole.shape[1] - gap]


def _tensor(axes: "Axes", tensor: Tensor, title: str, *, signed: bool) -> None:
    """Draws a tensor as an image, with the scale beside it."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    pictures = _Pictures.of(tensor.cpu())
    top = pictures.images.abs().max().item() or 1.0
    low = -top if signed else 0.0
    shades = "RdBu_r" if signed else "viridis"
    if pictures.images.ndim == 4:  # matplotlib takes colours from 0 to 1
        shades = "gray"
        pictures = replace(pictures, images=(pictures.images - low) / (top - low))
    scale = Normalize(low, top)
    axes.imshow(pictures.mosaic().numpy(), shades, scale)
    axes.figure.colorbar(ScalarMappable(scale, shades), ax=axes)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(pictures.across, fontsize=8.5)
    axes.set_ylabel(pictures.down, fontsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)


def _height(pictures: _Pictures) -> float:
    """Inches that the row of a tensor needs."""
    height, width = pictures.mosaic().shape[:2]
    return 0.7 + 3.2 * min(max(height / width, 0.3), 1.5)


def _of_all(what: str, shown: int, there: int) -> str:
    return f"{what} (1 to {shown:,}{'' if shown == there else f' of {there:,}'})"
