"""Pictures of what a network knows, each a matplotlib `Figure` that depends on no global state."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesify.errors import DataError
from bayesify.evaluation.metrics import calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E",
)  # fmt: skip
COLOURS = (VERMILION, BLUE, ORANGE, GREEN, PURPLE, SKY)
MARKERS = "os^Dv*"
LEAST = 5  # examples that a bin needs to have an accuracy worth showing


@dataclass(frozen=True)
class Judged:
    """An input and what two networks say of it, for `gallery`.

    Args:
        image: `[C, H, W]` or `[H, W]`, values in [0, 1].
        title: What it is.
        before: The network's answer and its confidence.
        after: The Bayesian network's answer and its confidence.
        epistemic: The Bayesian network's doubt about itself, in nats.
    """

    image: Tensor
    title: str
    before: tuple[str, float]
    after: tuple[str, float]
    epistemic: float


def reliability_diagram(
    judged: Mapping[str, tuple[Tensor, Tensor]], *, bins: int = 10, title: str = "Reliability"
) -> "Figure":
    """Accuracy against confidence: on the diagonal a confidence means what it says.

    Bins are equally wide, and those with fewer than five examples are left out; a bar is
    the 95 % interval of the accuracy. The axes begin where the points do.

    Args:
        judged: Confidence `[B]` and correctness `[B]` by the network's name.
        bins: How many.
        title: The heading.

    Example:
        >>> judged = {"network": (torch.tensor([0.9, 0.8]), torch.tensor([True, False]))}
        >>> len(reliability_diagram(judged).axes)
        1
    """
    if not judged:
        raise DataError("judged is empty: give the confidence and correctness of one network.")
    figure = new_figure(6.4, 5.4)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="perfect")
    lowest = 0.9
    for (name, (confidence, correct)), colour, marker in zip(
        judged.items(), _cycle(COLOURS, len(judged)), _cycle(MARKERS, len(judged)), strict=True
    ):
        said, right, error = _bins(confidence, correct, bins)
        lowest = min(
            [lowest, *said, *(r - below for r, below in zip(right, error[0], strict=True))]
        )
        ece = calibration_error(confidence.flatten(), correct.flatten())
        axes.errorbar(
            said,
            right,
            yerr=error,
            color=colour,
            marker=marker,
            capsize=3,
            label=f"{name} (ECE {ece:.3f})",
        )
    start = max(0.0, math.floor(10 * lowest) / 10)
    axes.set(xlim=(start, 1.01), ylim=(start, 1.01), title=title)
    axes.set_xlabel("confidence: probability given to the answer")
    axes.set_ylabel("accuracy: share of right answers")
    axes.legend(loc="upper left", frameon=False)
    caption(
        figure,
        f"Below the dashed line a network is surer than it is right. Bars: 95 % intervals.\n"
        f"Each point is one of {bins} equal ranges of confidence with at least {LEAST} answers.",
    )
    return figure


def entropy_histograms(
    entropies: Mapping[str, Mapping[str, Tensor]],
    *,
    classes: int,
    bins: int = 24,
    title: str = "How unsure of what it knows, and of what it does not",
) -> "Figure":
    """Predictive entropy of known and of strange inputs, one panel a network.

    Args:
        entropies: By network, by kind of input, entropies `[B]` in nats.
        classes: How many: the entropy is at most ln(classes).
        bins: How many bars.
        title: The heading.
    """
    if not entropies or not all(entropies.values()):
        raise DataError("entropies is empty: give those of at least one network on one set.")
    figure = new_figure(3.4 + 3.2 * len(entropies), 4.2)
    panels = figure.subplots(1, len(entropies), sharey=True, squeeze=False)[0]
    most = math.log(classes)
    edges = torch.linspace(0, most, bins + 1).tolist()
    for axes, (network, kinds) in zip(panels, entropies.items(), strict=True):
        for (kind, values), colour in zip(
            kinds.items(), _cycle((BLUE, ORANGE, GREEN, PURPLE), len(kinds)), strict=True
        ):
            share = torch.full((len(values),), 100 / len(values)).tolist()
            # float32 rounds a uniform prediction to a hair above ln(classes).
            shown = values.flatten().clamp(0, most).tolist()
            axes.hist(shown, edges, weights=share, color=colour, alpha=0.3)
            axes.hist(
                shown,
                edges,
                weights=share,
                color=colour,
                histtype="step",
                linewidth=1.8,
                label=f"{kind} (median {values.median():.2f})",
            )
        axes.axvline(most, color=GREY, linestyle="--", linewidth=1)
        axes.set(title=network, xlabel="predictive entropy (nats)", xlim=(0, 1.04 * most))
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.97, 1.0))
    panels[0].set_ylabel("share of inputs (%)")
    figure.suptitle(title)
    caption(
        figure,
        "0: no doubt at all. Dashed line: all classes equally likely. The less the two colours "
        "overlap,\nthe better doubt alone tells them apart.",
    )
    return figure


def gallery(
    inputs: Sequence[Judged],
    *,
    names: tuple[str, str] = ("network", "Bayesian"),
    columns: int = 6,
    title: str = "What the network was too sure of",
    chosen: str = "",
) -> "Figure":
    """Inputs with two networks' confidence under each.

    Args:
        inputs: What to show, in order.
        names: What the two networks are called.
        columns: Inputs in a row.
        title: The heading.
        chosen: A sentence on how the inputs were chosen, for the caption.
    """
    if not inputs:
        raise DataError("inputs is empty: there is nothing to show in a gallery.")
    columns = min(columns, len(inputs))
    rows = math.ceil(len(inputs) / columns)
    figure = new_figure(max(5.0, 1.75 * columns), 2.55 * rows + 1.1)
    grid = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=[2.2, 1] * rows)
    for position in range(rows * columns):
        row, column = divmod(position, columns)
        picture, bars = grid[2 * row][column], grid[2 * row + 1][column]
        if position < len(inputs):
            _picture(picture, inputs[position])
            _confidences(bars, inputs[position])
        else:
            picture.set_axis_off()
            bars.set_axis_off()
    figure.suptitle(title)
    caption(
        figure,
        f"Bars: the answer and the confidence in it, from 0 to 100 %; upper (orange): {names[0]}, "
        f"lower (blue): {names[1]}.\nDoubt about itself: epistemic uncertainty, in nats. {chosen}",
    )
    return figure


def _picture(axes: "Axes", judged: Judged) -> None:
    image = judged.image.detach().cpu()
    image = image.movedim(0, -1).squeeze(-1) if image.ndim == 3 else image
    axes.imshow(image.numpy(), cmap="gray" if image.ndim == 2 else None, vmin=0, vmax=1)
    axes.set_title(judged.title, fontsize=9)
    axes.set(xticks=[], yticks=[])


def _confidences(axes: "Axes", judged: Judged) -> None:
    for y, (answer, confidence), colour in ((1, judged.before, VERMILION), (0, judged.after, BLUE)):
        axes.barh(y, 1, color="#EEEEEE", height=0.8)
        axes.barh(y, confidence, color=colour, height=0.8, alpha=0.55)
        axes.text(0.03, y, f"{answer}  {confidence:.0%}", va="center", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(-0.5, 1.5), xticks=[], yticks=[])
    axes.set_xlabel(f"doubt about itself {judged.epistemic:.2f}", fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _bins(
    confidence: Tensor, correct: Tensor, bins: int
) -> tuple[list[float], list[float], tuple[list[float], list[float]]]:
    """Mean confidence, accuracy and its 95 % interval in equal bins that hold enough examples."""
    if confidence.shape != correct.shape or not confidence.numel():
        raise DataError(
            f"confidence {list(confidence.shape)} and correctness {list(correct.shape)} must be of "
            f"one shape and not empty."
        )
    said, right = confidence.flatten().double().cpu(), correct.flatten().double().cpu()
    place = (said * bins).long().clamp(0, bins - 1)
    parts = [(said[place == b], right[place == b]) for b in range(bins)]
    parts = [part for part in parts if len(part[0]) >= LEAST]
    rates = [r.mean().item() for _, r in parts]
    sides = [interval(rate, len(r)) for rate, (_, r) in zip(rates, parts, strict=True)]
    spread = [below for below, _ in sides], [above for _, above in sides]
    return [s.mean().item() for s, _ in parts], rates, spread


def interval(rate: float, count: int) -> tuple[float, float]:
    """How far the 95 % interval of a share reaches below and above it.

    Agresti and Coull's: a bin without mistakes has no accuracy known for certain.
    """
    centre = (rate * count + 2) / (count + 4)
    spread = 2 * math.sqrt(centre * (1 - centre) / (count + 4))
    return max(0.0, rate - max(0.0, centre - spread)), max(0.0, min(1.0, centre + spread) - rate)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of that many inches, which no window and no global state knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def caption(figure: "Figure", text: str) -> None:
    """Says below a figure how to read it."""
    figure.supxlabel(text, fontsize=8.5, color="#444444")


def _cycle(values: Sequence[str], count: int) -> list[str]:
    return [values[i % len(values)] for i in range(count)]
