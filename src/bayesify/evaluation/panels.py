"""Pictures of what `compare` measured: small figures that stay legible on a phone, light or dark.

Each function takes curves as `results.json` holds them and returns a matplotlib `Figure`. Text and
axes are drawn in `INK`, for which `to_svg` puts the colour of the page's text, and nothing is
painted behind them. What the curves are and how to read them stands in the page's captions.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from bayesify.evaluation.plots import (
    BLUE,
    COLOURS,
    GREEN,
    LEAST,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    interval,
)
from bayesify.evaluation.shifts import SHIFTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # replaced by currentColor
DASHES = ("-", "--", "-.", ":")
LONGEST = 28  # letters of a name in a legend
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bayesify",
    "text.parse_math": False,  # a dollar in somebody's class name is a dollar
    "font.size": 10.0,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def reliability(
    name: str, curve: Mapping[str, Any], network: Mapping[str, Any] | None = None, place: int = 0
) -> "Figure":
    """Accuracy against confidence of one method, over the network's own in the text's colour.

    Bins with fewer than five answers are left out; a bar is the 95 % interval of the accuracy, and
    a larger point stands for more answers.

    Args:
        name: What the method is called.
        curve: `confidence`, `accuracy` and `count` of each bin.
        network: The network's own, to compare with.
        place: Chooses colour and marker.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(3.4, 3.6)
        axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, linestyle=":", label="as it should")
        shown = [] if network is None else [("the network", network, INK, "o", "--")]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        lowest = 90.0
        for label, points, ink, mark, dash in [*shown, (_short(name), curve, colour, marker, "-")]:
            kept = [
                (100 * said, 100 * right, count, *(100 * side for side in interval(right, count)))
                for said, right, count in zip(
                    points["confidence"], points["accuracy"], points["count"], strict=True
                )
                if count >= LEAST and said is not None and right is not None
            ]
            if not kept:
                continue
            said, right, count, below, above = (list(column) for column in zip(*kept, strict=True))
            lowest = min(lowest, *said, *(r - b for r, b in zip(right, below, strict=True)))
            axes.errorbar(said, right, (below, above), color=ink, linestyle=dash, linewidth=1.4)
            sizes = [16 + 90 * number / sum(count) for number in count]
            axes.scatter(said, right, sizes, color=ink, marker=mark, label=label, zorder=3)
        start = max(0, 10 * int(lowest // 10))
        axes.set(xlim=(start, 101.5), ylim=(start, 101.5))
        axes.set(xlabel="confidence (%)", ylabel="right answers (%)", title=_short(name))
        _legend(figure, axes)
    return figure


def entropies(
    name: str, curve: Mapping[str, Any], top: float | None = None, test: str = "test"
) -> "Figure":
    """How unsure one method is of the test set and of other data: a histogram of entropies.

    Args:
        name: What the method is called.
        curve: `edges` of the bars in nats, the shares of `test` and, by name, of `ood`.
        top: Where the axis of shares ends, in per cent, so that panels can be compared.
        test: What the test set is called.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(3.4, 3.1)
        sets = {test: curve["test"], **curve.get("ood", {})}
        for place, (kind, shares) in enumerate(sets.items()):
            colour = (BLUE, ORANGE, GREEN, PURPLE, SKY)[place % 5]
            heights = [100 * share for share in shares]
            axes.stairs(heights, curve["edges"], fill=True, color=colour, alpha=0.25)
            axes.stairs(
                heights,
                curve["edges"],
                color=colour,
                linewidth=1.6,
                linestyle=DASHES[place % len(DASHES)],
                label=_short(kind),
            )
        axes.set(xlabel="predictive entropy (nats)", ylabel="inputs (%)", title=_short(name))
        axes.set_xlim(curve["edges"][0], curve["edges"][-1])
        # Most test inputs leave no doubt: on a plain scale their one bar would hide the rest.
        axes.set_yscale("function", functions=(np.sqrt, np.square))
        axes.set_ylim(0, top)
        axes.set_yticks(
            [tick for tick in (1, 5, 20, 40, 60, 80, 100) if tick <= axes.get_ylim()[1]]
        )
        _legend(figure, axes)
    return figure


def risk_coverage(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> "Figure":
    """Mistakes among the answers given, against the share of inputs answered, surest first.

    Args:
        curves: `coverage` and `risk`, in 0 to 1, by name; the network first.
    """
    return _lines(
        {name: (_per_cent(c["coverage"]), _per_cent(c["risk"])) for name, c in curves.items()},
        xlabel="answered, the surest first (%)",
        ylabel="wrong among the answered (%)",
    )


def shift_accuracy(curves: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Accuracy against the severity of a corruption.

    Args:
        curves: `kind`, `severity` and `accuracy` by name; the network first.
    """
    kind = next(iter(curves.values()))["kind"]
    return _lines(
        {name: (c["severity"], _per_cent(c["accuracy"])) for name, c in curves.items()},
        xlabel=_severity(kind),
        ylabel="right answers (%)",
        marked=True,
    )


def shift_entropy(name: str, curve: Mapping[str, Any], top: float | None = None) -> "Figure":
    """Mean predictive entropy against the severity of a corruption, split in its two parts.

    Args:
        name: What the method is called.
        curve: `kind`, `severity`, `aleatoric`, `epistemic` and `entropy`, in nats.
        top: Where the axis of entropy ends, so that panels can be compared.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(3.4, 3.1)
        severity, lower, total = curve["severity"], curve["aleatoric"], curve["entropy"]
        axes.fill_between(
            severity, 0, lower, color=BLUE, alpha=0.45, linewidth=0, label="aleatoric"
        )
        upper = [a + e for a, e in zip(lower, curve["epistemic"], strict=True)]
        axes.fill_between(
            severity, lower, upper, color=ORANGE, alpha=0.55, linewidth=0, label="epistemic"
        )
        axes.plot(severity, total, color=INK, marker="o", markersize=3, linewidth=1.4, label="both")
        axes.set(xlabel=_severity(curve["kind"]), ylabel="mean entropy (nats)", title=_short(name))
        axes.set_xlim(min(severity), max(severity) or 1)
        axes.set_ylim(0, top)
        _legend(figure, axes)
    return figure


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """A figure as SVG to stand inside a page, in the page's text colour.

    Args:
        figure: Drawn by this module.
        name: Begins every id, so that two figures of a page have none in common.
        description: What is read to those who do not see it.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    # Matplotlib's own output, no foreign XML.
    root = ElementTree.fromstring(text.getvalue())  # noqa: S314
    for element in root.iter():
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            key.rpartition("}")[2]: _own(key, value, name) for key, value in element.items()
        }
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": description}
    return ElementTree.tostring(root, encoding="unicode")


def _own(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return value.replace("#", f"#{name}-", 1)
    if key == "style":  # a page may lighten the one colour that is dark on a dark ground
        value = value.replace(BLUE.lower(), f"var(--blue, {BLUE.lower()})")
    return value.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")


def _lines(
    curves: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]],
    *,
    xlabel: str,
    ylabel: str,
    marked: bool = False,
) -> "Figure":
    """One line a method; the first is the network, dashed and in the text's colour."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(4.6, 3.9)
        for place, (name, (x, y)) in enumerate(curves.items()):
            axes.plot(
                [float("nan") if value is None else value for value in x],
                [float("nan") if value is None else value for value in y],
                color=INK if place == 0 else COLOURS[(place - 1) % len(COLOURS)],
                linestyle="--" if place == 0 else DASHES[2 * ((place - 1) // len(COLOURS)) % 4],
                marker=MARKERS[(place - 1) % len(MARKERS)],
                markersize=4.5,
                markevery=1 if marked else (0.02 * place, 0.2),
                linewidth=1.5,
                label=_short(name),
            )
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.margins(x=0.02)
        axes.set_ylim(bottom=0)
        _legend(figure, axes)
    return figure


def _severity(kind: str) -> str:
    return f"{kind}: {SHIFTS[kind].unit}" if kind in SHIFTS else f"severity of {_short(kind)}"


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(figure: "Figure", axes: "Axes") -> None:
    """Below the axes, where it hides nothing, in as many columns as its names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    room = 14 * figure.get_figwidth()  # letters
    columns = min(len(labels), 3, int(room // (max(map(len, labels)) + 5)))
    place: Any = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=max(1, columns), frameon=False, fontsize=8.5)


def _short(name: str) -> str:
    """A name of bearable length; one that begins with _ would be missing from the legend."""
    name = " ".join(str(name).split())
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return f"\u200b{name}" if name.startswith("_") else name


def _per_cent(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]
