import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, Classification, SettingError
from bayesify.calibration import (
    Search,
    Trial,
    averaged,
    best_slope,
    best_temperature,
    losses_at,
)

CLASSES = Classification()


def test_temperature_is_that_of_the_data() -> None:
    """Labels drawn from softmax(logits / 2.5) are best explained by a temperature of 2.5."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(20_000, 5)
    target = torch.distributions.Categorical(logits=logits / 2.5).sample()
    temperature, nll = best_temperature(CLASSES, averaged(CLASSES, logits[None]), target)
    assert temperature == pytest.approx(2.5, abs=0.1)
    assert nll == pytest.approx(
        nn.functional.cross_entropy(logits / temperature, target).item(), abs=1e-5
    )


def test_a_few_examples_do_not_ask_for_infinite_sharpness() -> None:
    """All is right: without a prior T goes to 0, and NLL on a mistake to infinity."""
    outputs = torch.tensor([[[4.0, 0.0]] * 30, [[3.0, 0.0]] * 30])
    temperature, _ = best_temperature(CLASSES, averaged(CLASSES, outputs), torch.zeros(30).long())
    assert temperature > 0.2


def test_temperature_never_hurts() -> None:
    logits, target = torch.zeros(10, 3), torch.arange(10) % 3
    assert best_temperature(CLASSES, averaged(CLASSES, logits[None]), target)[0] == 1.0


def doubtful(slope: float, size: int = 20_000, temperature: float = 1.3) -> tuple[Any, Tensor]:
    """Averages, and labels drawn from what they are with this slope."""
    torch.manual_seed(0)
    averages = averaged(CLASSES, 3 * torch.randn(1, size, 5))
    return averages, CLASSES.pool(averages, temperature, slope)["probs"].multinomial(1)[:, 0]


@pytest.mark.parametrize("slope", [-0.2, 0.0, 0.2])
def test_temperature_and_slope_are_those_of_the_data(slope: float) -> None:
    averages, target = doubtful(slope)
    temperature, found, nll = best_slope(CLASSES, averages, target)
    assert temperature == pytest.approx(1.3, abs=0.06)
    assert found == pytest.approx(slope, abs=0.03)
    _, alone = best_temperature(CLASSES, averages, target)
    assert nll <= alone
    assert (alone - nll > 1e-3) == (slope != 0)
    losses = losses_at(CLASSES, averages, target, temperature, found)
    assert nll == pytest.approx(losses.mean().item(), abs=1e-6)


def test_a_few_examples_ask_for_little_slope() -> None:
    """Without a prior they would be believed: three that are unsure, all of them right."""
    probs = torch.tensor([[0.99, 0.01]] * 27 + [[0.6, 0.4]] * 3)
    averages = {"probs": probs, "aleatoric": torch.zeros(30)}
    _, slope, _ = best_slope(CLASSES, averages, torch.zeros(30).long())
    assert -0.5 < slope <= 0


def test_nothing_to_choose_leaves_things_as_they_are() -> None:
    averages = averaged(CLASSES, torch.zeros(1, 10, 3))
    temperature, slope, nll = best_slope(CLASSES, averages, torch.arange(10) % 3)
    assert (temperature, slope) == (1.0, 0.0)
    assert nll == pytest.approx(math.log(3))


def test_calibrate_lowers_held_out_nll(
    trained: nn.Module, validation: DataLoader, test_set: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN(noise=0.3))
    before = bnn.evaluate(test_set).nll
    chosen = bnn.calibrate(validation)
    assert (bnn.noise, bnn.temperature, bnn.slope) == (
        chosen.noise,
        chosen.temperature,
        chosen.slope,
    )
    assert bnn.evaluate(test_set).nll < before
    assert bnn.evaluate(validation).nll == pytest.approx(chosen.nll, abs=1e-4)
    assert chosen.evaluations <= 16


def test_calibrate_is_no_worse_than_temperature_scaling(
    trained: nn.Module, validation: DataLoader
) -> None:
    with torch.no_grad():
        x = torch.cat([x for x, _ in validation])
        y = torch.cat([y for _, y in validation])
        _, scaled = best_temperature(CLASSES, averaged(CLASSES, trained(x)[None]), y)
    chosen = bayesify.convert(trained, ABNN()).calibrate(validation)
    assert chosen.nll <= scaled + 1e-5


def test_calibrate_gives_the_same_twice_and_by_any_batch(
    trained: nn.Module, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN())
    first = bnn.calibrate(validation)
    bnn.noise = 0.1
    again = bnn.calibrate(DataLoader(validation.dataset, batch_size=7))
    assert again.noise == pytest.approx(first.noise, rel=1e-3)
    assert again.nll == pytest.approx(first.nll, abs=1e-4)


def test_the_search_sees_a_part_and_what_it_found_everything(
    trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    noises: list[float] = []
    asked = Search.averages

    def counted(search: Search, noise: float, *, everything: bool = True) -> Any:
        averages, target = asked(search, noise, everything=everything)
        seen.append(len(target))
        noises.append(noise)
        return averages, target

    monkeypatch.setattr(Search, "averages", counted)
    torch.manual_seed(0)
    x = torch.randn(1500, 1, 8, 8)
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=trained(x) / 3).sample()
    bnn = bayesify.convert(trained, ABNN())
    data = DataLoader(TensorDataset(x, y), batch_size=250)
    chosen = bnn.calibrate(data)
    assert seen == [500] * (len(seen) - 1) + [1500]
    quiet, *searched, everything = noises
    assert quiet == 0
    assert everything in noises[:-1]
    assert all(b > 1.09 * a for a, b in itertools.pairwise(sorted(searched)))  # none almost twice
    assert chosen.evaluations == len(seen)
    assert bnn.evaluate(data).nll == pytest.approx(chosen.nll, abs=1e-4)


def test_noise_that_ruins_is_taken_away(validation: DataLoader, trained: nn.Module) -> None:
    bnn = bayesify.convert(trained, ABNN(noise=50.0))
    assert bnn.calibrate(validation).noise < 50


def test_a_failure_leaves_noise_and_temperature(trained: nn.Module) -> None:
    bnn = bayesify.convert(trained, ABNN(noise=0.2))
    with pytest.raises(bayesify.DataError, match="labels run"):
        bnn.calibrate([(torch.randn(4, 1, 8, 8), torch.full((4,), 7))])
    assert (bnn.noise, bnn.temperature, bnn.slope) == (0.2, 1.0, 0.0)


def test_draws_must_fit_the_members(trained: nn.Module, validation: DataLoader) -> None:
    with pytest.raises(SettingError, match=r"draws=4 is not a multiple of the 3 members.*draws=3"):
        bayesify.convert(trained).calibrate(validation, draws=4)


def test_dense_outputs_are_thinned() -> None:
    network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)).eval()
    x, y = torch.randn(4, 1, 64, 64), torch.randint(0, 3, (4, 64, 64))
    chosen = bayesify.convert(network, ABNN(draws=3)).calibrate([(x, y)])
    assert chosen.nll > 0


def test_regression_noise_is_found() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)).eval()
    x = torch.randn(2000, 3)
    with torch.no_grad():
        y: Tensor = network(x) + 0.3 * torch.randn(2000, 1)
    bnn = bayesify.convert(network, ABNN(noise=0.0), likelihood="regression")
    bnn.calibrate([(x, y)])
    assert bnn.predict(x).std.mean().item() == pytest.approx(0.3, abs=0.02)
    assert bnn.evaluate([(x, y)]).rmse == pytest.approx(0.3, abs=0.02)
    assert bnn.slope == 0


def test_a_failure_leaves_a_regression_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)).eval()
    bnn = bayesify.convert(network, ABNN(noise=0.2), likelihood="regression")
    with pytest.raises(bayesify.DataError, match="NaN"):
        bnn.calibrate([(torch.randn(4, 3), torch.full((4, 1), torch.nan))])
    assert bnn.noise == 0.2
    assert bnn.likelihood.log_variance.item() == 0


@pytest.mark.parametrize(
    ("mirrored", "steepness", "noise"),
    [(False, 1e-3, 0.4), (False, 1e2, 0.1), (True, 0.2, 0.2), (True, 1e2, 0.1)],
)
def test_the_noise_that_is_preferred_unless_another_is_clearly_likelier(
    trained: nn.Module,
    validation: DataLoader,
    monkeypatch: pytest.MonkeyPatch,
    mirrored: bool,
    steepness: float,
    noise: float,
) -> None:
    """Noise 0.4 is likeliest without a temperature, 0.1 with one, and 0.2 is what draws have."""

    def tried(search: Search, noise: float) -> Trial:
        def away(lowest: float) -> float:
            return math.log(noise / lowest) ** 2 if noise else 100.0

        torch.manual_seed(round(1e6 * noise))
        scatter = torch.randn(100)
        losses = steepness * away(0.1) + scatter - scatter.mean()
        return Trial(noise, 1.5, losses, untempered=away(0.4))

    monkeypatch.setattr(Search, "_try", tried)
    bnn = bayesify.convert(trained, ABNN(noise=0.2))
    bnn.mirrored = mirrored
    assert bnn.calibrate(validation).noise == pytest.approx(noise, rel=1e-3)
