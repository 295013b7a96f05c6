"""The loss between members, and the noise of gradients, against closed forms."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bayesify import ABNN, IBNN, MAP, BayesAdapter, DataError, SettingError, convert
from bayesify.evaluation.landscape import gradient_noise, loss_along_line


class Scaled(nn.Module):
    """One number, times the normalised input: all that trains is a scale and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def two_members(noise: float = 0.0) -> nn.Module:
    bnn = convert(Scaled().eval(), ABNN(members=2, draws=2, noise=noise), likelihood="regression")
    with torch.no_grad():
        bnn.posterior.values["norm.weight"].copy_(torch.tensor([[-1.0], [2.0]]))
    return bnn


def test_the_line_between_two_scales_is_a_parabola() -> None:
    bnn = two_members(noise=0.3)
    x, y = torch.randn(30, 1), torch.randn(30, 1)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    line = loss_along_line(bnn, batches, points=7)
    inputs = x / (1 + 1e-5) ** 0.5
    for t, loss in zip(line.at.tolist(), line.loss.tolist(), strict=True):
        scale = -1 + 3 * t
        squares = (scale * inputs - y).square().mean().item()
        expected = 0.5 * squares + 0.5 * torch.log(torch.tensor(2 * torch.pi)).item()
        assert loss == pytest.approx(expected, abs=1e-5)
    assert line.barrier == 0  # a convex loss
    back = loss_along_line(bnn, batches, first=1, second=0, points=7)
    assert torch.allclose(back.loss, line.loss.flip(0))


def test_a_barrier_is_the_rise_above_the_ends() -> None:
    """Squared outputs cannot tell a scale from its opposite, and between them is 0."""
    bnn = convert(
        nn.Sequential(Scaled(), Squared()).eval(),
        ABNN(members=2, draws=2),
        likelihood="regression",
    )
    with torch.no_grad():
        bnn.posterior.values["0.norm.weight"].copy_(torch.tensor([[-1.0], [1.0]]))
    x = torch.randn(40, 1)
    y = (x / (1 + 1e-5) ** 0.5).square()
    line = loss_along_line(bnn, [(x, y)], points=5)
    assert line.at.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert line.barrier == pytest.approx(0.5 * y.square().mean().item(), rel=1e-4)


def test_untrained_members_are_the_same_everywhere(
    trained: nn.Module, test_set: DataLoader
) -> None:
    bnn = convert(trained, ABNN(members=3, draws=3))
    line = loss_along_line(bnn, test_set, second=2, points=3)
    assert line.loss.max() - line.loss.min() < 1e-6
    nll, _ = convert(trained, MAP()).judge([(x, y) for x, y in _inputs(test_set)], draws=1, seed=0)
    assert line.loss[0].item() == pytest.approx(nll, abs=1e-5)


def _inputs(loader: DataLoader) -> list[tuple[object, Tensor]]:
    from bayesify.batches import labelled

    return list(labelled(loader))


def test_components_of_a_mixture_keep_their_distance(
    trained: nn.Module, test_set: DataLoader
) -> None:
    bnn = convert(trained, IBNN(components=2, mean_std=0.3, draws=4))
    line = loss_along_line(bnn, test_set, points=3)
    assert line.loss.max() - line.loss.min() > 1e-3


def test_members_must_be_two() -> None:
    bnn, batch = two_members(), [(torch.randn(4, 1), torch.randn(4, 1))]
    for first, second in ((0, 0), (0, 2), (-1, 1)):
        with pytest.raises(SettingError, match="two different members of 2"):
            loss_along_line(bnn, batch, first=first, second=second)
    with pytest.raises(SettingError, match="points=1 must be a whole number, 2 or more"):
        loss_along_line(bnn, batch, points=1)
    with pytest.raises(DataError, match="the loader is empty"):
        loss_along_line(bnn, [])


def test_the_noise_of_a_gradient_in_closed_form() -> None:
    """Loss 0.5 (g (1 + a e) x + b - y)^2 with one draw e for a batch of one example."""
    bnn = convert(
        Scaled().eval(),
        ABNN(members=1, draws=1, noise=0.5, weight_decay=0.0),
        likelihood="regression",
    )
    x = 1 / (1 + 1e-5) ** 0.5  # what the normalisation layer makes of 1
    found = gradient_noise(bnn, (torch.ones(1, 1), torch.zeros(1, 1)), runs=600, seed=1)
    # gradients: of b, (1 + a e) x; of g, (1 + a e)^2 x^2
    a = 0.5
    variance_b, variance_g = a**2 * x**2, (4 * a**2 + 2 * a**4) * x**4
    assert found.parameters == 2
    assert found.variance == pytest.approx((variance_b + variance_g) / 2, rel=0.25)
    assert found.signal == pytest.approx((x**2 + (1 + a**2) ** 2 * x**4) / 2, rel=0.25)


def test_without_noise_only_mini_batches_make_gradients_vary(
    trained: nn.Module, stripes: tuple[Tensor, Tensor]
) -> None:
    batch = (stripes[0][:32], stripes[1][:32])
    still = convert(trained, ABNN(members=1, draws=1, noise=0.0))
    assert gradient_noise(still, batch, runs=3).variance < 1e-12
    few, many = (gradient_noise(still, batch, runs=20, subset=n).variance for n in (4, 16))
    assert few > 2 * many > 0
    noisy = convert(trained, ABNN(members=1, draws=1, noise=0.3))
    mine, shared = (gradient_noise(noisy, batch, runs=20, groups=g).variance for g in (None, 1))
    assert shared > 2 * mine > 0  # a draw for every example averages out


def test_the_model_is_left_as_it_was(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], untouched: object
) -> None:
    batch = (stripes[0][:8], stripes[1][:8])
    for method in (ABNN(), BayesAdapter(ood_weight=0.0), IBNN(components=2, draws=2)):
        bnn = convert(trained, method)
        before = copy.deepcopy(bnn.state_dict())
        with untouched(trained):
            first = gradient_noise(bnn, batch, runs=3, seed=2)
            assert first == gradient_noise(bnn, batch, runs=3, seed=2)
        assert first.variance > 0
        assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
        assert all(p.grad is None for p in bnn.parameters())


def test_outliers_in_pixel_units(trained: nn.Module, stripes: tuple[Tensor, Tensor]) -> None:
    low, high = stripes[0].min().item(), stripes[0].max().item()
    scale = ([-low / (high - low)], [1 / (high - low)])
    bnn = convert(trained, BayesAdapter())
    with_outliers = gradient_noise(
        bnn, (stripes[0][:8], stripes[1][:8]), runs=4, normalisation=scale
    )
    assert with_outliers.variance > 0


def test_nothing_to_measure(trained: nn.Module, stripes: tuple[Tensor, Tensor]) -> None:
    batch = (stripes[0][:8], stripes[1][:8])
    with pytest.raises(SettingError, match="MAP trains nothing by gradients"):
        gradient_noise(convert(trained, MAP()), batch)
    bnn = convert(trained, ABNN())
    with pytest.raises(SettingError, match="runs=1"):
        gradient_noise(bnn, batch, runs=1)
    with pytest.raises(SettingError, match="subset=9 is more than the 8 examples"):
        gradient_noise(bnn, batch, subset=9)
    with pytest.raises(DataError, match="no target"):
        gradient_noise(bnn, batch[0])
