"""What a fit ends with."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, Temperature
from bayesify.batches import labelled
from bayesify.calibration import FINE, as_likely
from bayesify.ending import Ending
from bayesify.validation import HeldOut, hold_out


def batches(x: Tensor, y: Tensor) -> list:
    return list(labelled([(x, y)]))


def drawn(logits: Tensor, temperature: float) -> Tensor:
    """Labels for which this temperature is right."""
    return (logits / temperature).softmax(1).multinomial(1)[:, 0]


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(2000, 3)


@pytest.fixture
def bnn() -> bayesify.BayesianModel:
    """Logits are what it is shown."""
    network = nn.Linear(3, 3)
    nn.init.eye_(network.weight)
    nn.init.zeros_(network.bias)
    return bayesify.convert(network.eval(), Temperature())


def test_a_fit_ends_with_the_temperature_of_the_average() -> None:
    """Labels drawn from the average of draws, sharpened."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)).eval()
    bnn = bayesify.convert(network, ABNN(members=1, noise=2.0, draws=24))
    x = torch.randn(3000, 2)
    sharp = bnn.predict(x).probs ** 2
    bnn.slope = -0.2  # of an earlier `calibrate`
    held = HeldOut(batches(x, sharp.multinomial(1)[:, 0]))
    found = Ending(bnn, held, seed=0).choose(mirror=False)
    assert found.temperature == pytest.approx(0.5, rel=0.1)
    assert found.noise == bnn.noise == 2.0
    assert bnn.slope == 0


@pytest.mark.parametrize(
    ("as_they_are", "augmented", "chosen"), [(0.6, 2.0, 1.0), (1.5, 2.0, 1.5), (0.5, 0.7, 0.7)]
)
def test_a_network_that_does_not_know_its_images_is_corrected_if_both_kinds_ask_for_it(
    bnn: bayesify.BayesianModel,
    logits: Tensor,
    as_they_are: float,
    augmented: float,
    chosen: float,
) -> None:
    held = HeldOut(
        batches(logits, drawn(logits, augmented)), batches(logits, drawn(logits, as_they_are))
    )
    assert Ending(bnn, held, seed=0).choose(mirror=False).temperature == pytest.approx(
        chosen, rel=0 if chosen == 1 else 0.1
    )


def test_of_a_network_that_knows_its_images_the_highest_temperature_as_likely_is_taken(
    bnn: bayesify.BayesianModel, logits: Tensor
) -> None:
    target = drawn(logits, 1.5)
    likeliest = Ending(bnn, HeldOut(batches(logits, target)), seed=0).choose(mirror=False)
    held = HeldOut(batches(logits, target), batches(logits, logits.argmax(1)))
    highest = Ending(bnn, held, seed=0).choose(mirror=False)

    def losses(temperature: float) -> Tensor:
        return nn.functional.cross_entropy(logits / temperature, target, reduction="none")

    best = losses(likeliest.temperature)
    assert highest.temperature > likeliest.temperature
    assert as_likely(losses(highest.temperature), best)
    assert not as_likely(losses(highest.temperature * FINE), best)
    assert highest.nll == pytest.approx(losses(highest.temperature).mean().item(), abs=1e-5)


def test_what_is_known_is_what_the_network_knows_without_noise() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)).eval()
    bnn = bayesify.convert(network, ABNN(members=1, noise=2.0, draws=1))
    x = torch.randn(300, 2)
    with torch.no_grad():
        known = batches(x, network(x).argmax(1))
    assert bnn.judge(known, draws=1, seed=0)[1] < 0.9
    assert Ending(bnn, HeldOut(known, known), seed=0).known == 1.0
    assert bnn.noise == 2.0
    assert Ending(bnn, HeldOut(known), seed=0).known is None


def test_a_fit_to_images_that_the_network_does_not_know_leaves_it_calibrated(
    trained: nn.Module, stripes: tuple[Tensor, Tensor]
) -> None:
    """Strongly augmented, they ask a network that is right as it is for less confidence."""
    network = copy.deepcopy(trained)
    with torch.no_grad():
        network[-1].weight *= 5
        target = drawn(network(stripes[0]), 1.0)
    loader = DataLoader(TensorDataset(stripes[0], target), batch_size=50)
    bnn = bayesify.convert(network, Temperature())
    fitted = bnn.fit(loader, progress=False)
    strange = hold_out(loader, seed=0)[1]
    likeliest = Ending(bnn, HeldOut(strange.batches), seed=0).choose(mirror=False)
    assert likeliest.temperature > 1.2
    assert fitted.temperature == pytest.approx(1, abs=0.1)
