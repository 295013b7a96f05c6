"""Moments of posteriors against closed forms and many draws, and what their pictures show."""

import math

import pytest
import torch
from torch import nn

from bayesify import (
    ABNN,
    IBNN,
    MAP,
    BayesAdapter,
    DeepEnsemble,
    MCDropout,
    SettingError,
    UnknownSiteError,
    convert,
)
from bayesify.evaluation.moments import _Pictures, moments, posterior_pictures
from bayesify.methods import Method


def test_a_mean_field_has_its_own_moments(cnn: nn.Module) -> None:
    bnn = convert(cnn, BayesAdapter(noise=0.5))
    found = moments(bnn, "3.weight")
    assert list(found) == ["3.weight"]
    mean, log_std = bnn.posterior.mean["3.weight"], bnn.posterior.log_std["3.weight"]
    assert torch.equal(found["3.weight"].mean, mean.detach().double())
    expected = (0.5 * log_std.detach().double().exp()).square()
    assert torch.allclose(found["3.weight"].variance, expected, rtol=1e-6)
    assert found["3.weight"].draws is None


def test_members_vary_within_and_between(cnn: nn.Module) -> None:
    bnn = convert(cnn, ABNN(members=2, draws=2, noise=0.1), where="*")
    values = bnn.posterior.values
    with torch.no_grad():
        values["1.weight"].copy_(torch.tensor([[1.0], [3.0]]).expand(2, 6))
        values["1.bias"].copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 6))
    found = moments(bnn, "1.*")
    assert found["1.weight"].mean.tolist() == pytest.approx([2.0] * 6)
    assert found["1.weight"].variance.tolist() == pytest.approx([1 + 0.01 * (1 + 9) / 2] * 6)
    assert found["1.bias"].variance.tolist() == pytest.approx([1.0] * 6)  # no noise of its own


@pytest.mark.parametrize(
    "method",
    [ABNN(), BayesAdapter(), IBNN(components=3, mean_std=0.3, draws=3), DeepEnsemble(members=2)],
    ids=lambda method: type(method).__name__,
)
def test_closed_forms_agree_with_draws(cnn: nn.Module, method: Method) -> None:
    bnn = convert(cnn, method)
    with torch.no_grad():
        for parameter in bnn.posterior.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = moments(bnn)
    drawn = bnn.posterior.draws(0, range(1200))
    assert found.keys() == drawn.keys()
    for name, one in found.items():
        values = drawn[name].detach().double()
        variance = values.var(0, correction=0)
        assert torch.allclose(variance, one.variance, rtol=0.35, atol=1e-9), name
        slack = 5 * (one.variance / len(values)).sqrt() + 1e-6
        assert ((values.mean(0) - one.mean).abs() <= slack).all(), name


def test_masks_are_drawn() -> None:
    network = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.25), nn.Linear(40, 2)).eval()
    (found,) = moments(convert(network, MCDropout()), draws=400).values()
    assert found.draws == 400
    assert found.mean.mean().item() == pytest.approx(1, abs=0.03)
    assert found.variance.mean().item() == pytest.approx(0.25 / 0.75, rel=0.1)


def test_one_network_has_no_moments(cnn: nn.Module) -> None:
    with pytest.raises(UnknownSiteError, match="MAP makes no tensor of the network random"):
        moments(convert(cnn, MAP()))
    with pytest.raises(UnknownSiteError, match=r"no site matches 'conv9'.*1\.weight"):
        moments(convert(cnn, ABNN(), where="*"), "conv9")
    with pytest.raises(SettingError, match="draws=1 must be a whole number, 2 or more"):
        moments(convert(cnn, ABNN()), draws=1)


# The pictures


def test_means_stand_beside_variances(cnn: nn.Module) -> None:
    bnn = convert(cnn, BayesAdapter(log_std=(-5.0, -5.0)))
    figure = posterior_pictures(bnn, ["0.weight", "8.weight"])
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [
        "0.weight: mean", "0.weight: variance", "8.weight: mean", "8.weight: variance",
    ]  # fmt: skip
    matrix = panels[2].images[0].get_array()
    assert torch.equal(torch.tensor(matrix.data), cnn[8].weight.detach().double())
    assert panels[3].images[0].get_array().max() == pytest.approx(math.exp(-10))
    assert panels[0].get_xlabel() == "output channel (1 to 6), row by row"
    assert (panels[2].get_xlabel(), panels[2].get_ylabel()) == ("input", "output")
    said = figure.get_supxlabel()
    assert "BayesAdapter, noise 1, in closed form" in said
    assert "squares of its unit" in said
    figure.canvas.draw()


@pytest.mark.parametrize(
    ("shape", "size", "labels"),
    [
        ((), (1, 1), ("number (1 to 1), row by row", "")),
        ((6,), (2, 3), ("number (1 to 6), row by row", "")),
        ((3000,), (16, 16), ("number (1 to 256 of 3,000), row by row", "")),
        ((10, 64), (10, 64), ("input", "output")),
        ((2, 3, 5), (3, 17), ("input channel (1 to 3)", "output channel (1 to 2)")),
        ((5, 3, 3, 3), (7, 11, 3), ("output channel (1 to 5), row by row", "")),
        ((8, 1, 3, 3), (11, 11), ("output channel (1 to 8), row by row", "")),
        (
            (32, 20, 3, 3),
            (63, 63),
            ("input channel (1 to 16 of 20)", "output channel (1 to 16 of 32)"),
        ),
        ((2, 4, 2, 3, 3), (13, 15), ("input channel (1 to 4)", "output channel (1 to 2)")),
    ],
)
def test_a_tensor_of_any_shape_has_a_picture(
    shape: tuple[int, ...], size: tuple[int, ...], labels: tuple[str, str]
) -> None:
    pictures = _Pictures.of(torch.randn(shape))
    assert pictures.mosaic().shape == size
    assert (pictures.across, pictures.down) == labels


def test_kernels_keep_their_place() -> None:
    tensor = torch.randn(4, 5, 3, 3)
    mosaic = _Pictures.of(tensor).mosaic()
    assert torch.equal(mosaic[4:7, 8:11], tensor[1, 2])
    assert mosaic[3].isnan().all()
    coloured = torch.rand(5, 3, 2, 2)
    mosaic = _Pictures.of(coloured).mosaic()
    assert torch.equal(mosaic[3:5, 0:2], coloured[3].movedim(0, -1))
    assert (mosaic[:, 2] == 1).all()


def test_colours_are_within_their_range() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    figure = posterior_pictures(convert(network, BayesAdapter(noise=0.0)), "0.weight")
    mean, variance = (axes.images[0].get_array() for axes in figure.axes if axes.get_title())
    assert mean.min() >= 0
    assert mean.max() == 1  # the gaps
    assert variance.min() == 0
    figure.canvas.draw()


def test_where_draws_decide_the_caption_says_so() -> None:
    network = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.25), nn.Linear(40, 2)).eval()
    figure = posterior_pictures(convert(network, MCDropout()), 1, draws=8)
    assert "MCDropout, noise 1, over 8 draws" in figure.get_supxlabel()
