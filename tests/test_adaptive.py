"""Adaptive draws: easy examples stop early, and nothing else changes."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, MAP, BayesAdapter, NonFiniteError, Prediction, SettingError
from bayesify.adaptive import MARGIN
from bayesify.model import BayesianModel

Stripes = tuple[Tensor, Tensor]
DRAWS, TOLERANCE = 24, 0.05


@pytest.fixture
def bnn(trained: nn.Module) -> BayesianModel:
    sure = copy.deepcopy(trained)
    with torch.no_grad():
        for parameter in sure[8].parameters():
            parameter.mul_(4)  # sure of some and unsure of others, as large networks are
    return bayesify.convert(sure, ABNN(noise=0.05), where="*")


def answer(p: Prediction) -> Tensor:
    return p.mean if p.kind == "values" else p.probs


def assert_draws_are_the_first(bnn: BayesianModel, x: Tensor, p: Prediction, draws: int) -> None:
    """Each example has what that many draws, the first ones, give without a tolerance."""
    assert p.used is not None
    for count in p.used.unique().tolist():
        assert count == draws or count % (2 * bnn.posterior.components) == 0
        rows = p.used == count
        alone = bnn.predict(x[rows], draws=count)
        for name, value in alone.averages.items():
            torch.testing.assert_close(p[rows].averages[name], value, atol=1e-5, rtol=1e-4)


def test_easy_examples_stop_and_the_others_have_all_draws(
    bnn: BayesianModel, stripes: Stripes
) -> None:
    p = bnn.predict(stripes[0], draws=DRAWS, tolerance=TOLERANCE)
    assert p.used is not None
    assert p.used.shape == (600,)
    assert p.used.unique().tolist() == [6, 12, 24]
    assert_draws_are_the_first(bnn, stripes[0], p, DRAWS)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("tolerance", [0.01, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_the_error_is_within_the_tolerance(
    bnn: BayesianModel, stripes: Stripes, tolerance: float, seed: int, temperature: float
) -> None:
    bnn.temperature = temperature
    full = bnn.predict(stripes[0], draws=DRAWS, seed=seed)
    p = bnn.predict(stripes[0], draws=DRAWS, seed=seed, tolerance=tolerance)
    off = (p.probs - full.probs).abs().amax(1)
    assert (off <= tolerance + 1e-5).float().mean() >= 0.99
    assert p.used is not None
    assert p.used.float().mean() < 0.9 * DRAWS
    if temperature != 1:
        return
    # Which is not so if all stop after the first round.
    few = bnn.predict(stripes[0], draws=6, seed=seed)
    assert ((few.probs - full.probs).abs().amax(1) > tolerance).float().mean() > 0.01


def test_a_larger_tolerance_takes_fewer_draws(bnn: BayesianModel, stripes: Stripes) -> None:
    used = [
        bnn.predict(stripes[0], draws=DRAWS, tolerance=tolerance).used.sum().item()
        for tolerance in (1e-9, 0.02, 0.05, 0.1, 10.0)
    ]
    assert used == sorted(used, reverse=True)
    assert used[0] == 600 * DRAWS
    assert used[-1] == 600 * 6


def test_the_rule(bnn: BayesianModel, stripes: Stripes) -> None:
    x = stripes[0]
    draws = bnn.predict(x, draws=DRAWS, keep_draws=True).draws.double()
    pairs = torch.cat([(draws[s : s + 3] + draws[s + 3 : s + 6]) / 2 for s in range(0, 24, 6)])
    stops = torch.full((len(x),), DRAWS)
    for n in (6, 3):
        mean, variance = pairs[:n].mean(0), pairs[:n].var(0)
        variance = ((n - 1) * variance + 2 * mean * (1 - mean) / 5) / (n + 1)
        error = (MARGIN * ((1 / n - 1 / 12) * variance).sqrt()).amax(1)
        stops[error <= TOLERANCE] = 2 * n
    assert torch.equal(bnn.predict(x, draws=DRAWS, tolerance=TOLERANCE).used, stops)


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_the_rule_of_regression_has_the_unit_of_its_noise(unit: float) -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return unit * x * self.norm.weight**2

    bnn = bayesify.convert(Squares(), ABNN(noise=0.2), likelihood="regression")
    bnn.likelihood.log_variance.data.fill_(2 * math.log(unit))
    x = torch.linspace(0, 3, 50)[:, None]
    p = bnn.predict(x, draws=DRAWS, tolerance=0.1)
    stops = torch.full((50, 1), DRAWS)
    for n in (6, 3):
        q = bnn.predict(x, draws=2 * n, keep_draws=True)
        sets = q.draws.unflatten(0, (-1, 2, 3)).mean(1).flatten(0, 1)
        variance = ((n - 1) * sets.var(0) + 2 * q.epistemic / 5) / (n + 1)
        error = MARGIN * ((1 / n - 1 / 12) * variance).sqrt() / q.std
        stops[error <= 0.1] = 2 * n
    assert p.used.tolist() == stops.flatten().tolist()
    assert p.used.unique().tolist() == [6, 12, 24]


def test_pairs_count_not_draws() -> None:
    class Odd(nn.Module):
        """Its output is odd in the noise: draws differ, and every pair has the same mean."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.norm.weight - 1)

    bnn = bayesify.convert(Odd(), ABNN(noise=0.1), likelihood="regression")
    p = bnn.predict(torch.ones(2, 1), draws=DRAWS, tolerance=0.08)
    assert p.epistemic.min() > 1e-3
    assert p.used.tolist() == [6, 6]


def test_neighbours_do_not_matter(bnn: BayesianModel, stripes: Stripes) -> None:
    x = stripes[0][:60]
    p = bnn.predict(x, draws=DRAWS, tolerance=TOLERANCE)
    assert len(p.used.unique()) > 1
    order = torch.randperm(60)
    for other, rows in (
        (bnn.predict(x[order], draws=DRAWS, tolerance=TOLERANCE), order),
        (bnn.predict(x, draws=DRAWS, tolerance=TOLERANCE, batch_size=7), slice(None)),
        (bnn.predict(x, draws=DRAWS, tolerance=TOLERANCE, memory_budget=1 << 17), slice(None)),
        (bnn.predict(x[3:4], draws=DRAWS, tolerance=TOLERANCE), slice(3, 4)),
    ):
        assert torch.equal(other.used, p.used[rows])
        torch.testing.assert_close(other.probs, p.probs[rows], atol=1e-5, rtol=1e-4)


def test_loaders_and_several_inputs(bnn: BayesianModel, stripes: Stripes) -> None:
    x, y = stripes[0][:90], stripes[1][:90]
    p = bnn.predict(x, draws=DRAWS, tolerance=TOLERANCE)
    for other in (
        DataLoader(TensorDataset(x, y), 40),
        {"input": x, "labels": y},
    ):
        q = bnn.predict(other, draws=DRAWS, tolerance=TOLERANCE)
        assert torch.equal(q.used, p.used)
        torch.testing.assert_close(q.probs, p.probs, atol=1e-5, rtol=1e-4)


def test_few_sizes_run(
    bnn: BayesianModel, stripes: Stripes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    outputs = bnn.runner.outputs

    def record(draws: Any, inputs: Any, **more: Any) -> Iterator[Tensor]:
        sizes.append((len(next(iter(draws.values()))), len(inputs)))
        return outputs(draws, inputs, **more)

    monkeypatch.setattr(bnn.runner, "outputs", record)
    p = bnn.predict(stripes[0], draws=DRAWS, tolerance=TOLERANCE, batch_size=48)
    first = [size for _, size in sizes[:13]]
    assert first == [48] * 12 + [24]  # what there is, as without a tolerance
    assert {size for _, size in sizes[13:]} <= {1, 2, 4, 8, 16, 32, 48}
    # Those that go on are pooled, whatever part they came from.
    left = [int((p.used > draws).sum()) for draws in (6, 12)]
    assert min(left) > 48
    assert len(sizes) == 13 + sum(math.ceil(count / 48) for count in left)


class Pixels(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.GroupNorm(1, 4)
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("draws", [12, 15, 24])
@pytest.mark.parametrize(
    ("likelihood", "outputs", "dense"),
    [
        ("classification", 3, False),
        ("classification", 3, True),
        ("binary", 1, False),
        ("multilabel", 3, False),
        ("multilabel", 3, True),
        ("regression", 2, False),
        ("regression", 1, True),
    ],
)
def test_every_likelihood(likelihood: str, outputs: int, dense: bool, draws: int) -> None:
    pooled = () if dense else (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(Pixels(outputs), *pooled).eval()
    bnn = bayesify.convert(network, ABNN(noise=0.2), likelihood=likelihood)
    bnn.temperature = 0.8
    x = torch.randn(40, 1, 6, 6) * torch.linspace(0.01, 2, 40).view(-1, 1, 1, 1)
    full = bnn.predict(x, draws=draws)
    off = [math.inf]
    for tolerance in (0.3, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01):
        p = bnn.predict(x, draws=draws, tolerance=tolerance)
        scale = full.std if full.kind == "values" else 1.0
        error = (answer(p) - answer(full)).abs() / scale
        off.append(error.max().item())
        assert off[-1] <= tolerance
        assert_draws_are_the_first(bnn, x, p, draws)
    assert max(off[1:]) > 0


@pytest.mark.parametrize(
    ("method", "first"),
    [
        (ABNN(members=1, noise=0.0), 6),
        (ABNN(members=2, noise=0.0), 8),
        (ABNN(members=5, draws=20, noise=0.0), 10),
        (BayesAdapter(noise=0.0), 6),
        (IBNN(noise=0.0), 8),
    ],
    ids=str,
)
def test_sets_are_complete(
    cnn: nn.Module, images: Tensor, method: bayesify.Method, first: int
) -> None:
    bnn = bayesify.convert(cnn, method)
    p = bnn.predict(images, draws=40, tolerance=10.0)
    assert p.used.tolist() == [first] * 12
    torch.testing.assert_close(p.probs, bnn.predict(images, draws=40).probs)
    few = bnn.predict(images, draws=method.components, tolerance=10.0)
    assert few.used.tolist() == [method.components] * 12


def test_what_is_not_random_runs_once(cnn: nn.Module, images: Tensor) -> None:
    p = bayesify.convert(cnn, MAP()).predict(images, tolerance=0.1)
    assert p.used.tolist() == [1] * 12
    torch.testing.assert_close(p.probs, cnn(images).softmax(1).detach())


@pytest.mark.parametrize("tolerance", [0, -0.1, math.nan, math.inf, True, "0.1"])
def test_bad_tolerance(cnn: nn.Module, images: Tensor, tolerance: Any) -> None:
    with pytest.raises(SettingError, match="must be a number above 0"):
        bayesify.convert(cnn).predict(images, tolerance=tolerance)


def test_draws_cannot_be_kept(cnn: nn.Module, images: Tensor) -> None:
    with pytest.raises(SettingError, match="keep_draws=True goes with all draws"):
        bayesify.convert(cnn).predict(images, tolerance=0.1, keep_draws=True)


def test_nan_from_the_network() -> None:
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + x.sum(1, keepdim=True).sqrt()

    x = torch.tensor([1.0, 1.0, -1.0])[:, None].expand(3, 4)
    with pytest.raises(NonFiniteError, match="NaN for 1 of 3 examples, the first at position 2"):
        bayesify.convert(Roots()).predict(x, draws=24, tolerance=0.1, batch_size=2)
