"""Figures: what is on them, not how they look, which people have to judge."""

import math

import pytest
import torch
from matplotlib.figure import Figure

from bayesify.errors import DataError
from bayesify.evaluation import plots
from bayesify.evaluation.plots import Judged


def texts(figure: Figure) -> str:
    shown = [figure.get_suptitle(), figure.get_supxlabel()]
    for axes in figure.axes:
        shown += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        shown += [text.get_text() for text in axes.texts]
        if legend := axes.get_legend():
            shown += [text.get_text() for text in legend.get_texts()]
    return "\n".join(shown)


def test_reliability_shows_accuracy_against_confidence() -> None:
    confidence = torch.tensor([0.55] * 20 + [0.95] * 20)
    correct = torch.tensor([True, False] * 10 + [True] * 20)
    figure = plots.reliability_diagram({"mine": (confidence, correct)})
    (axes,) = figure.axes
    points = axes.containers[0][0]
    assert points.get_xdata() == pytest.approx([0.55, 0.95], abs=1e-6)
    assert points.get_ydata() == pytest.approx([0.5, 1.0])
    assert "mine (ECE 0.050)" in texts(figure)
    assert "Below the dashed line" in texts(figure)
    assert "accuracy" in axes.get_ylabel()
    assert "confidence" in axes.get_xlabel()


def test_reliability_leaves_out_bins_with_too_few_examples() -> None:
    confidence = torch.tensor([0.15] * (plots.LEAST - 1) + [0.85] * plots.LEAST)
    said, right, (below, above) = plots._bins(confidence, torch.ones_like(confidence) > 0, 10)
    assert said == pytest.approx([0.85], abs=1e-6)
    assert right == [1.0]
    assert above == [0.0]
    assert 0 < below[0] < 1


def test_reliability_takes_confidences_that_round_above_1() -> None:
    confidence = torch.tensor([1.0 + 1e-6] * 10)
    said, _, _ = plots._bins(confidence, torch.ones(10) > 0, 10)
    assert len(said) == 1


def test_histograms_show_shares_within_the_possible_range() -> None:
    entropies = {
        "network": {"known": torch.zeros(10), "strange": torch.full((4,), math.log(10) + 1e-4)},
        "bayesian": {"known": torch.full((10,), 0.5), "strange": torch.full((4,), 2.0)},
    }
    figure = plots.entropy_histograms(entropies, classes=10, bins=8)
    assert [axes.get_title() for axes in figure.axes] == ["network", "bayesian"]
    for axes in figure.axes:
        bars = axes.containers[0]
        assert sum(bar.get_height() for bar in bars) == pytest.approx(100, abs=1e-3)
        assert "nats" in axes.get_xlabel()
    assert "%" in figure.axes[0].get_ylabel()
    assert "known (median 0.50)" in texts(figure)


def judged(shape: tuple[int, ...] = (1, 8, 8)) -> Judged:
    return Judged(torch.rand(shape), "a 9", ("1", 0.99), ("9", 0.4), 0.25)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 8, 8)])
def test_gallery_shows_both_answers_and_the_doubt(shape: tuple[int, ...]) -> None:
    figure = plots.gallery([judged(shape)] * 4, columns=3, names=("before", "after"))
    shown = texts(figure)
    for text in ("a 9", "1  99%", "9  40%", "doubt about itself 0.25", "before", "after", "nats"):
        assert text in shown
    assert len(figure.axes) == 12


def test_figures_need_no_display_and_no_global_state() -> None:
    import matplotlib.pyplot as plt

    plots.gallery([judged()]).canvas.draw()
    assert plt.get_fignums() == []


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(DataError, match="judged is empty"):
        plots.reliability_diagram({})
    with pytest.raises(DataError, match="must be of one shape and not empty"):
        plots.reliability_diagram({"x": (torch.rand(3), torch.rand(4) > 0)})
    with pytest.raises(DataError, match="entropies is empty"):
        plots.entropy_histograms({}, classes=10)
    with pytest.raises(DataError, match="inputs is empty"):
        plots.gallery([])
