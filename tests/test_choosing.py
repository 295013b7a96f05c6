"""where="auto", on networks whose random part is known: data are drawn with it random."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from architectures import ARCHITECTURES
from bayesify import (
    ABNN,
    IBNN,
    MAP,
    SWAG,
    BayesAdapter,
    BayesifyWarning,
    DataError,
    DeepEnsemble,
    MCDropout,
    Method,
    NothingToRandomiseError,
    Regression,
    SettingError,
    UnknownSiteError,
)
from bayesify.choice import Candidate, Choice
from bayesify.posterior import key
from bayesify.validation import HeldOut, collect

NOISE = 0.3
ALONE = ABNN(members=1, draws=32)


class GainNorm(nn.Module):
    """What ABNN takes for a normalisation layer, with nothing but its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Sum(nn.Module):
    """y = sum of x_i, each through a gain; gain 7 runs first, gain 0 last. Noise: exp(-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ModuleList(GainNorm() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.zeros_like(x[:, :1])
        for place in reversed(range(8)):
            mean = mean + self.gains[place](x[:, place : place + 1])
        return torch.cat([mean, torch.full_like(mean, -2.0)], 1)


def drawn(random: int, examples: int = 1200) -> DataLoader:
    """Data of a `Sum` whose last gains are random, another draw for each example."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(examples, 8, generator=generator)
    gains = torch.ones(examples, 8)
    gains[:, :random] += NOISE * torch.randn(examples, random, generator=generator)
    y = (gains * x).sum(1) + torch.randn(examples, generator=generator) * torch.tensor(-1.0).exp()
    return DataLoader(TensorDataset(x, y), batch_size=100)


def auto(random: int, *, seed: int = 0) -> bayesify.BayesianModel:
    return bayesify.convert(
        Sum(),
        ALONE,
        likelihood=Regression(heteroscedastic=True),
        where="auto",
        validation=drawn(random),
        seed=seed,
    )


def names(bnn: bayesify.BayesianModel) -> set[str]:
    return {site.name for site in bnn.sites}


@pytest.mark.parametrize("random", [1, 2, 4, 8])
def test_the_part_that_is_random_is_found(random: int) -> None:
    bnn = auto(random)
    choice = bnn.choice
    assert choice is not None
    assert [candidate.where for candidate in choice.candidates] == [1, 2, 4, 8]
    assert names(bnn) == {f"gains.{place}.weight" for place in range(random)}
    assert choice.sites == choice.order[-random:]
    assert choice.chosen.noise == pytest.approx(NOISE, rel=0.45)
    assert choice.chosen.numbers == random


def test_the_cheapest_is_taken_of_those_within_a_standard_error() -> None:
    def candidate(where: int, worse: float, error: float) -> Candidate:
        return Candidate(where, 1, 0.1, 1.0, 1.0 + worse, worse, error, where / 8)

    order = tuple("abcdefgh")
    tried = (candidate(1, 0.3, 0.2), candidate(2, 0.2, 0.2), candidate(8, 0.0, 0.0))
    assert Choice(tried, order, 10, False).chosen.where == 2
    assert Choice(tried, order, 10, False).sites == ("g", "h")
    tried = (candidate(1, 0.3, 0.2), candidate(2, 0.2, 0.19), candidate(8, 0.0, 0.0))
    assert Choice(tried, order, 10, False).chosen.where == 8
    tried = (candidate(1, 3e-5, 2e-5), candidate(8, 0.0, 0.0))
    assert Choice(tried, order, 10, False).chosen.where == 1, "the same but for rounding"


def test_numbers_are_those_of_the_models_themselves() -> None:
    """NLL, difference and standard error, computed again from scratch."""
    bnn = auto(4)
    calibrating, judging = collect(drawn(4), 0).halves()
    losses = {}
    for candidate in bnn.choice.candidates:
        trial = bayesify.convert(
            Sum(),
            ALONE,
            likelihood=Regression(heteroscedastic=True),
            where=list(bnn.choice.order[-candidate.where :]),
        )
        found = trial.calibrate(calibrating)
        assert found.noise == pytest.approx(candidate.noise, rel=1e-3)
        assert found.temperature == pytest.approx(candidate.temperature, rel=1e-3)
        trial.noise, trial.temperature = candidate.noise, candidate.temperature
        each = []
        for x, y in judging:
            prediction = trial.predict(x, seed=key("judge", 0))
            y = y[:, None].double()  # noqa: PLW2901
            variance = prediction.std.square()
            each.append((variance.log() + (prediction.mean - y).square() / variance) / 2)
        losses[candidate.where] = torch.cat(each).flatten() + math.log(2 * math.pi) / 2
    for candidate in bnn.choice.candidates:
        above = losses[candidate.where] - losses[4]
        assert len(above) == bnn.choice.examples == 600
        assert candidate.nll == pytest.approx(losses[candidate.where].mean().item(), abs=1e-4)
        assert candidate.worse == pytest.approx(above.mean().item(), abs=1e-4)
        assert candidate.error == pytest.approx(above.std().item() / 600**0.5, abs=1e-4)


@pytest.mark.filterwarnings("ignore::bayesify.BayesifyWarning")
def test_cost_is_operations_behind_the_first_random_layer() -> None:
    network = nn.Sequential(nn.Linear(4, 50), nn.LayerNorm(50), nn.Linear(50, 3), nn.LayerNorm(3))
    loader = [(torch.randn(40, 4), torch.arange(40) % 3)]
    choice = bayesify.convert(network, ABNN(draws=6), where="auto", validation=loader).choice
    # Of one example: products twice, and a LayerNorm's result with its mean and deviation.
    first, norm, second, last = 2 * 4 * 50, 50 + 2, 2 * 50 * 3, 3 + 2
    whole = first + 6 * (norm + second + last)
    late = first + norm + second + 6 * last
    assert [each.cost for each in choice.candidates] == pytest.approx([late / whole, 1.0], rel=0.02)


@pytest.mark.filterwarnings("ignore::bayesify.BayesifyWarning")
def test_candidates_are_whole_layers(trained: nn.Module, validation: DataLoader) -> None:
    """A layer's weight costs no more than its bias alone."""
    bnn = bayesify.convert(trained, BayesAdapter(draws=4), where="auto", validation=validation)
    assert bnn.choice.order[-2:] == ("8.weight", "8.bias")
    assert [candidate.where for candidate in bnn.choice.candidates] == [2, 4, 8]


@pytest.mark.parametrize(
    "method",
    [ABNN(draws=6), BayesAdapter(draws=4, noise=20.0), IBNN(components=2, draws=4),
     MCDropout(draws=4, rate=0.2)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::bayesify.BayesifyWarning")
def test_any_method_leaves_the_network_alone_and_its_settings(
    method: Method, trained: nn.Module, validation: DataLoader, untouched: Callable[..., Any]
) -> None:
    with untouched(trained):
        bnn = bayesify.convert(trained, method, where="auto", validation=validation)
    assert names(bnn) == set(bnn.choice.sites)
    assert len(bnn.sites) == bnn.choice.chosen.where
    assert (bnn.noise, bnn.temperature, bnn.strategy) == (method.noise, 1.0, "auto")
    same = bayesify.convert(trained, method, where=list(bnn.choice.sites))
    x = next(iter(validation))[0]
    assert torch.equal(same.predict(x).probs, bnn.predict(x).probs)


@pytest.mark.parametrize("name", ["torch-transformer", "torch-lstm", "transformers-Bert"])
@pytest.mark.filterwarnings("ignore::bayesify.BayesifyWarning")
def test_any_network(name: str, untouched: Callable[..., Any]) -> None:
    architecture = next(each for each in ARCHITECTURES if each.name == name)
    network = architecture.build().eval()
    x, y = architecture.example(), torch.tensor([0, 1])
    batch = {**x, "labels": y} if isinstance(x, dict) else (x, y)
    with untouched(network):
        bnn = bayesify.convert(network, ABNN(draws=3), where="auto", validation=[batch] * 3)
    costs = [candidate.cost for candidate in bnn.choice.candidates]
    assert costs == sorted(set(costs))
    assert costs[-1] == 1.0
    assert bnn.predict(x).probs.shape == (2, 5)


@pytest.mark.filterwarnings("ignore::bayesify.BayesifyWarning")
def test_dense_outputs_are_judged_by_example() -> None:
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    loader = [(torch.randn(10, 1, 6, 6), torch.randint(0, 3, (10, 4, 4)))]
    bnn = bayesify.convert(network.eval(), ABNN(draws=3), where="auto", validation=loader)
    assert bnn.choice.examples == 5


def test_one_seed_one_choice() -> None:
    first = auto(2).choice
    assert auto(2).choice == first
    other = auto(2, seed=1).choice
    assert other != first
    assert other.sites == first.sites


def test_every_kind_of_example_calibrates_and_judges() -> None:
    """Sorted data, in batches of one or an odd number, are halved evenly, and none is lost."""
    for size in (1, 5, 30):
        x, y = torch.arange(30.0)[:, None], torch.arange(30) // 10
        halves = collect(DataLoader(TensorDataset(x, y), batch_size=size), 0).halves()
        labels = [torch.cat([target for _, target in half]) for half in halves]
        assert [label.bincount().tolist() for label in labels] == [[5, 5, 5], [5, 5, 5]]
        rows = [inputs.tensors()[0].flatten() for half in halves for inputs, _ in half]
        assert torch.cat(rows).sort().values.tolist() == list(range(30))


@pytest.mark.filterwarnings("ignore:where='auto' had little:bayesify.BayesifyWarning")
def test_training_images_are_augmented(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    known = bayesify.convert(trained, ABNN(draws=3), where="auto", training=loader).choice
    assert known.augmented
    assert known.examples == 15  # half of a tenth of 300
    assert "strongly augmented" in str(known)
    unseen = bayesify.convert(trained, ABNN(draws=3), where="auto", validation=validation).choice
    assert not unseen.augmented
    assert unseen.examples == 75


def test_a_choice_prints_as_a_table() -> None:
    lines = str(auto(2).choice).splitlines()
    assert lines[0].split() == ["random", "sites", "numbers", "noise", "NLL", "worse", "by", "cost"]
    assert [line[:14].strip() for line in lines[1:5]] == [
        "last 1", "last 2, chosen", "last 4", "all 8",
    ]  # fmt: skip
    assert "the best" in lines[2]
    assert lines[4].endswith("100%")
    assert lines[5] == "judged by 600 examples"


def test_a_choice_is_saved_and_copied(tmp_path: Path) -> None:
    bnn = auto(2)
    bnn.save(tmp_path / "bnn")
    written = json.loads((tmp_path / "bnn" / "bayesify.json").read_text())
    assert set(written["sites"]) == names(bnn)
    loaded = bayesify.load(tmp_path / "bnn", Sum())
    assert loaded.choice == bnn.choice
    assert names(loaded) == names(bnn)
    x = torch.randn(5, 8)
    assert torch.equal(loaded.predict(x).mean, bnn.predict(x).mean)
    assert copy.deepcopy(bnn).choice == bnn.choice


def test_a_folder_without_a_choice_is_read_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    bayesify.convert(Sum(), ALONE, likelihood=Regression(heteroscedastic=True)).save(tmp_path / "b")
    file = tmp_path / "b" / "bayesify.json"
    written = json.loads(file.read_text())
    del written["choice"]  # as it was written before there was one
    file.write_text(json.dumps(written))
    assert bayesify.load(tmp_path / "b", Sum()).choice is None
    file.write_text(json.dumps(written | {"choice": {"candidates": [{"where": 1}]}}))
    with pytest.raises(bayesify.CorruptFileError, match="not one of bayesify's files"):
        bayesify.load(tmp_path / "b", Sum())


def test_little_to_choose_by_is_said(cnn: nn.Module, images: Tensor) -> None:
    """A network that is always right and never sure enough asks for no noise anywhere."""
    loader = [(images, cnn(images).argmax(1))]
    with pytest.warns(BayesifyWarning, match="little to choose by.*6 examples"):
        bnn = bayesify.convert(cnn, ABNN(draws=3), where="auto", validation=loader)
    assert bnn.choice.chosen.where == 1


def few(examples: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(examples, 1, 8, 8), torch.arange(examples) % 4)]


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ({}, SettingError, "pass validation=.*or training="),
        ({"validation": few(8), "training": few(8)}, SettingError, "not both"),
        ({"validation": []}, DataError, "the loader is empty"),
        ({"validation": few(3)}, DataError, "has 3 examples to choose by, and needs 4"),
        ({"validation": torch.zeros(3)}, DataError, "a Tensor is none"),
        ({"validation": [(torch.randn(8, 1, 8, 8),)]}, DataError, "no target"),
        ({"validation": [(torch.randn(8, 3), torch.zeros(8))]}, DataError, "cannot run on inputs"),
        ({"validation": [(few(8)[0][0], torch.full((8,), 9))]}, DataError, "labels run from 9"),
        ({"validation": [(few(8)[0][0] / 0, torch.zeros(8))]}, DataError, "NaN or infinite"),
    ],
)
def test_data_that_cannot_choose(
    data: dict[str, Any],
    error: type[Exception],
    said: str,
    cnn: nn.Module,
    untouched: Callable[..., Any],
) -> None:
    with untouched(cnn), pytest.raises(error, match=said):
        bayesify.convert(cnn, where="auto", **data)


@pytest.mark.parametrize("data", ["validation", "training"])
def test_data_are_for_auto_only(data: str, cnn: nn.Module) -> None:
    with pytest.raises(SettingError, match="are for where='auto', and where=1"):
        bayesify.convert(cnn, where=1, **{data: few(8)})


@pytest.mark.parametrize("method", [SWAG(), DeepEnsemble()])
def test_a_method_that_is_certain_before_it_is_fitted(method: Method, cnn: nn.Module) -> None:
    with pytest.raises(SettingError, match="is certain before `fit`.*where=4"):
        bayesify.convert(cnn, method, where="auto", validation=few(8))


def test_members_that_differ_are_no_certainty(cnn: nn.Module) -> None:
    other = copy.deepcopy(cnn)
    with torch.no_grad():
        other[8].weight += 0.1
    ensemble = bayesify.convert(cnn, DeepEnsemble(checkpoints=[cnn, other]))
    assert not ensemble.posterior.is_certain()
    assert ensemble.noise == 1.0
    assert bayesify.convert(cnn, DeepEnsemble(checkpoints=[cnn, cnn])).posterior.is_certain()
    assert not bayesify.convert(cnn, ABNN(members=1, draws=1, noise=0.0)).posterior.is_certain()
    assert not bayesify.convert(cnn, MCDropout(rate=1e-6)).posterior.is_certain()


def test_nothing_to_choose_from(cnn: nn.Module) -> None:
    with pytest.raises(UnknownSiteError, match="MAP makes none.*Drop where="):
        bayesify.convert(cnn, MAP(), where="auto", validation=few(8))
    with pytest.raises(NothingToRandomiseError, match="BayesAdapter"):
        bayesify.convert(nn.Linear(2, 2), where="auto", validation=few(8))


def test_a_plan_has_no_data(cnn: nn.Module) -> None:
    with pytest.raises(SettingError, match="a plan has none.*convert.*bayesify fit --where auto"):
        bayesify.plan(cnn, where="auto")


def test_a_held_out_set_knows_its_length() -> None:
    held = HeldOut(collect(few(7), 0).batches)
    assert [sum(len(inputs) for inputs, _ in half) for half in held.halves()] == [4, 3]
