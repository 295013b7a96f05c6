import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import bayesify
from architectures import Recurrent
from bayesify import (
    ABNN,
    IBNN,
    MAP,
    BayesAdapter,
    BayesifyWarning,
    CorruptFileError,
    DataError,
    MeanFieldVI,
    Method,
    NonFiniteError,
    SettingError,
)
from bayesify.batches import Inputs
from bayesify.outliers import Outliers
from bayesify.posterior import key
from bayesify.validation import collect, hold_out, seeded
from conftest import small_cnn

# A few steps on little data may not help, and then the network itself is kept.
pytestmark = [
    pytest.mark.filterwarnings("ignore:training did not help"),
    pytest.mark.filterwarnings("ignore:.*performance drop"),  # torch, of kernels under vmap
]


class Times(nn.Module):
    """Multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


METHOD = ABNN(members=2, draws=12, noise=0.03, lr=0.01, favoured_weight=1.2)


def values(bnn: bayesify.BayesianModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in bnn.trainable().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def bnn(trained: nn.Module) -> bayesify.BayesianModel:
    return bayesify.convert(trained, METHOD)


def test_fit_improves_and_ends_no_worse(
    bnn: bayesify.BayesianModel,
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    test_set: DataLoader,
    untouched: Callable[..., object],
) -> None:
    with untouched(trained):
        before = bayesify.convert(trained, ABNN(members=1, draws=1, noise=0.0)).evaluate(test_set)
        result = bnn.fit(loader, epochs=3, validation=validation, progress=False)
        after = bnn.evaluate(test_set)
    assert result.steps == 3 * 6
    assert result.nll <= min(result.network_nll, result.untrained_nll)
    assert result.kept.startswith("step")
    assert after.nll < before.nll
    assert [step for step, _, _ in result.history] == [4, 8, 12, 16, 18]
    assert "held-out NLL" in str(result)


def test_only_the_posterior_trains(bnn: bayesify.BayesianModel, loader: DataLoader) -> None:
    frozen = {name: value.clone() for name, value in bnn.network.state_dict().items()}
    before = values(bnn)
    bnn.fit(loader, epochs=1, validation=list(loader), progress=False)
    assert same(frozen, bnn.network.state_dict())
    assert set(before) == set(bnn.trainable())
    assert not same(before, values(bnn))
    assert all(parameter.grad is None for parameter in bnn.parameters())


def test_members_come_to_differ(bnn: bayesify.BayesianModel, loader: DataLoader) -> None:
    bnn.fit(loader, epochs=1, validation=list(loader), progress=False)
    for name, value in bnn.posterior.tensors().items():
        assert not torch.equal(value[0], value[1]), name


def test_one_seed_one_result(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    def jitter(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    def run(seed: int) -> dict[str, Tensor]:
        torch.randn(seed + 1)  # the state of the global generator must not matter
        bnn = bayesify.convert(trained, METHOD)
        bnn.fit(loader, validation=validation, seed=seed, progress=False, augment=jitter)
        return values(bnn)

    first = run(0)
    assert same(first, run(0))
    assert not same(first, run(1))


def test_the_users_random_numbers_are_left_alone(
    bnn: bayesify.BayesianModel, loader: DataLoader
) -> None:
    generator = torch.Generator().manual_seed(3)
    own = DataLoader(loader.dataset, batch_size=50, shuffle=True, generator=generator)
    held = list(loader)
    state, mine = torch.get_rng_state(), generator.get_state()
    bnn.fit(own, validation=held, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), mine)


def test_learning_rate_too_high_keeps_the_untrained_state(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN(members=1, draws=8, noise=0.001, lr=30.0))
    before = values(bnn)
    result = bnn.fit(loader, validation=validation, progress=False)
    assert result.kept in ("untrained", "network")
    assert same(before, values(bnn))


def test_fit_ends_with_the_temperature_that_held_out_data_asks_for(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    sure = nn.Sequential(trained, Times(5.0)).eval()

    def fitted(method: Method, data: DataLoader | None, **settings: bool) -> tuple[float, float]:
        bnn = bayesify.convert(sure, method)
        result = bnn.fit(loader, validation=data, progress=False, **settings)
        assert result.temperature == bnn.temperature
        if data is None:
            return result.temperature, math.nan
        seed = key("judge", 0)
        nll, _ = bnn.judge(collect(data, 0).batches, draws=method.draws, seed=seed)
        return result.temperature, nll

    as_it_is, loss = fitted(METHOD, validation, temper=False)
    softened, lower = fitted(METHOD, validation)
    assert as_it_is == 1
    assert softened > 2
    assert lower < loss - 0.05
    assert fitted(METHOD, None)[0] > 1.2, "training images can tell: both kinds ask for it"
    assert fitted(MAP(), validation)[0] == 1, "the network as it is"


def test_training_data_as_they_are_choose_no_temperature() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2), Times(9.0)).eval()
    x = torch.randn(40, 4)
    data = DataLoader(TensorDataset(x, torch.randint(0, 2, (40,))), batch_size=10)
    bnn = bayesify.convert(network, ABNN(members=1, draws=4))
    with pytest.warns(BayesifyWarning, match="not images that could be augmented"):
        result = bnn.fit(data, progress=False)
    assert (result.temperature, bnn.temperature) == (1, 1)
    assert "temperature" not in str(result)
    assert bnn.fit(data, validation=data, progress=False).temperature > 2
    assert "at a temperature of" in str(bnn.fit(data, validation=data, progress=False))


def test_noise_that_ruins_keeps_the_network(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN(members=1, draws=8, noise=3.0, lr=0.0))
    with pytest.warns(BayesifyWarning, match="best for the network itself"):
        result = bnn.fit(loader, validation=validation, progress=False)
    assert result.kept == "network"
    assert bnn.noise == 0
    x = next(iter(loader))[0]
    tempered = (trained(x) / result.temperature).softmax(1)
    torch.testing.assert_close(bnn.predict(x, draws=1).probs, tempered)


def test_loss_that_explodes_is_an_error_and_loses_nothing(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, ABNN(members=1, draws=8, noise=0.0, lr=1e30))
    before = values(bnn)
    with pytest.raises(NonFiniteError, match="Lower the learning rate"):
        bnn.fit(loader, validation=validation, progress=False, epochs=3)
    assert same(before, values(bnn))


def test_interruption_keeps_the_best_state(
    bnn: bayesify.BayesianModel, loader: DataLoader, validation: DataLoader
) -> None:
    class Interrupted:
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[object]:
            yield from list(loader)[:3]
            raise KeyboardInterrupt

    before = values(bnn)
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(Interrupted(), epochs=2, validation=validation, progress=False, validations=1)
    assert same(before, values(bnn))


@pytest.mark.parametrize("groups", [1, 4, None])
def test_groups(bnn: bayesify.BayesianModel, loader: DataLoader, groups: int | None) -> None:
    result = bnn.fit(loader, validation=list(loader), progress=False, groups=groups)
    assert math.isfinite(result.nll)


def test_a_network_without_vmap_rule_trains_by_groups() -> None:
    data = TensorDataset(torch.randn(60, 4, 6), torch.randint(0, 5, (60,)))
    bnn = bayesify.convert(Recurrent().eval(), BayesAdapter(draws=4))
    with pytest.warns(BayesifyWarning, match="cannot be vectorised over examples"):
        result = bnn.fit(DataLoader(data, 10), validation=DataLoader(data, 10), progress=False)
    assert result.groups == 4


def test_gradients_are_those_of_the_papers_loss(
    trained: nn.Module, loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise and momentum, one step is the gradient of weighted cross-entropy."""
    x, y = next(iter(loader))
    method = ABNN(members=2, draws=2, noise=0.0, lr=0.1, weight_decay=0.0, favoured_weight=3.0)
    bnn = bayesify.convert(trained, method)
    steps = {}

    class Plain(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            steps.update({n: p.grad.clone() for n, p in bnn.trainable().items()})

    monkeypatch.setattr(
        ABNN, "optimizer", lambda self, posterior, examples: Plain(posterior.parameters(), 0.1)
    )
    bnn.fit([(x, y)], validation=[(x, y)], progress=False, seed=4)
    for member in range(2):
        weight = method.class_weights(member, 4, 4)
        assert sorted(weight.tolist()) == [1, 1, 3, 3]
        network = bnn.sample(index=member)
        loss = nn.functional.cross_entropy(network(x), y, weight, reduction="none").mean()
        loss.backward()
        for name, parameter in network.named_parameters():
            if "posterior.values." + name.replace(".", "/") in steps:
                found = steps["posterior.values." + name.replace(".", "/")][member]
                torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", [METHOD, BayesAdapter(draws=2), IBNN(draws=4)])
def test_a_method_knows_its_passes(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, method: Method
) -> None:
    """How often it sees the data, and how often it is judged, unless told."""

    def run(**settings: int) -> bayesify.fit_result.FitResult:
        bnn = bayesify.convert(trained, method)
        return bnn.fit(loader, validation=validation, progress=False, **settings)

    usual = run()
    assert usual.steps == method.epochs * len(loader)
    assert usual.history == run(epochs=method.epochs, validations=method.validations).history
    told = run(epochs=5, validations=1)
    assert (told.steps, len(told.history)) == (5 * len(loader), 1)


def test_no_validation_just_before_the_last(
    bnn: bayesify.BayesianModel, loader: DataLoader, validation: DataLoader
) -> None:
    result = bnn.fit(loader, epochs=5, validation=validation, validations=4, progress=False)
    assert [step for step, _, _ in result.history] == [7, 14, 21, 30]  # and not 28


# Parts of a batch

# Pixels of `stripes` run from 0 to 1 by this mean and standard deviation.
OUTLIERS = {"normalisation": ([0.5], [0.08]), "ood": [torch.rand(30, 1, 8, 8)]}
FROZEN = {"lr": 0.01, "psi_lr": 0.1, "adapt_statistics": False, "adam": False}
ADAPTER = BayesAdapter(draws=2, log_std=(-3.0, -3.0), **FROZEN)
DOUBTING = BayesAdapter(draws=2, log_std=(-3.0, -3.0), ood_radius=0.2, **FROZEN)
ATTACKED = dataclasses.replace(DOUBTING, head_log_std=(-1.0, -1.0), ood_steps=3)
SCALES = IBNN(draws=3, components=3, samples=2, lr=0.01, mean_std=0.05, adapt_statistics=False)
PARTS = {
    "abnn": (METHOD, {}),
    "abnn-groups": (METHOD, {"groups": 3}),
    "bayes-adapter": (ADAPTER, {}),
    "bayes-adapter-groups": (ADAPTER, {"groups": 3}),
    "bayes-adapter-one-draw": (ADAPTER, {"groups": 1}),
    "bayes-adapter-outliers": (DOUBTING, OUTLIERS),
    "bayes-adapter-attacked": (ATTACKED, OUTLIERS),
    "bayes-adapter-outliers-groups": (DOUBTING, {**OUTLIERS, "groups": 3}),
    "bayes-adapter-outliers-one-draw": (DOUBTING, {**OUTLIERS, "groups": 1}),
    "ibnn": (SCALES, {}),
    "ibnn-groups": (SCALES, {"groups": 6}),
}


def test_attacks_judge_too(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that learns to tell attacks is judged by attacks, on itself as it then is."""
    batches = [(stripes[0][:10], stripes[1][:10])]
    bnn = bayesify.convert(trained, ATTACKED)
    attacked: list[Tensor] = []
    batch = Outliers.batch

    def watch(self: Outliers, inputs: Inputs, seed: int, loss: Any = None) -> Inputs:
        attacked.append(loss(inputs).detach())
        return batch(self, inputs, seed, loss)

    monkeypatch.setattr(Outliers, "batch", watch)
    bnn.fit(batches, validation=batches, epochs=1, progress=False, **OUTLIERS)
    # Two outliers are tried, the network and the untrained posterior judged, a step done, judged.
    tried, network, untrained, step, judged = attacked
    assert len(tried) < len(network)
    torch.testing.assert_close(network, untrained)
    torch.testing.assert_close(network, step)
    assert not torch.allclose(judged, step)


@pytest.mark.parametrize("name", PARTS)
def test_accumulation_gives_the_same_update(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], name: str
) -> None:
    """In 2 parts, in uneven ones and in single examples; the last batch is a short one."""
    method, more = PARTS[name]
    x, y = stripes[0][:26].double(), stripes[1][:26]
    batches = list(zip(x.split(10), y.split(10), strict=True))

    def run(accumulate: int) -> dict[str, Tensor]:
        bnn = bayesify.convert(trained, method).double()
        before = values(bnn)
        settings = {**more, "accumulate": accumulate, "keep": "last", "epochs": 1}
        bnn.fit(batches, validation=batches, progress=False, **settings)
        after = values(bnn)
        assert not any(torch.equal(after[name], before[name]) for name in after)
        return after

    whole = run(1)
    for accumulate in (2, 3, 20):
        for parameter, value in run(accumulate).items():
            torch.testing.assert_close(
                value, whole[parameter], rtol=1e-5, atol=1e-6, msg=f"{accumulate}: {parameter}"
            )


@pytest.mark.parametrize("method", [METHOD, ADAPTER, SCALES], ids=lambda m: type(m).__name__)
def test_a_last_batch_of_one_example_does_not_end_draws_for_each(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], method: Method
) -> None:
    batches = list(zip(stripes[0][:11].split(10), stripes[1][:11].split(10), strict=True))
    bnn = bayesify.convert(trained, method)
    assert bnn.fit(batches, validation=batches, epochs=2, progress=False).groups is None
    single = bayesify.convert(trained, method)
    if method is not SCALES:  # which needs an example for each component
        assert single.fit(batches[1:], validation=batches, progress=False).groups is None


@pytest.mark.parametrize("accumulate", [0, -1])
def test_bad_accumulation(bnn: bayesify.BayesianModel, loader: DataLoader, accumulate: int) -> None:
    with pytest.raises(SettingError, match=f"accumulate={accumulate}"):
        bnn.fit(loader, progress=False, accumulate=accumulate)


# n, the number of examples


def seen_examples(
    monkeypatch: pytest.MonkeyPatch, loader: object, validation: object, **settings: object
) -> set[int]:
    """Every n that a method with a KL is told in a fit."""
    told = set()
    penalty = IBNN.penalty

    def note(self: IBNN, posterior: object, progress: float, examples: int) -> Tensor:
        told.add(examples)
        return penalty(self, posterior, progress, examples)

    monkeypatch.setattr(IBNN, "penalty", note)
    bnn = bayesify.convert(small_cnn(), IBNN(components=2, draws=2))
    bnn.fit(loader, validation=validation, progress=False, **settings)
    return told


class Stream(IterableDataset):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([self.rows[i] for i in range(len(self.rows))])


def test_n_is_the_size_of_the_training_data(
    monkeypatch: pytest.MonkeyPatch, loader: DataLoader, validation: DataLoader
) -> None:
    rows = loader.dataset
    cases = [
        (loader, validation, {}, 300),
        (loader, None, {}, 270),  # a tenth is held out
        (DataLoader(rows, 50, sampler=SubsetRandomSampler(range(80))), validation, {}, 80),
        (list(DataLoader(rows, 100)), validation, {}, 300),
        (loader, validation, {"num_examples": 1000}, 1000),
        (DataLoader(Stream(rows), 50), validation, {"num_examples": 150}, 150),
    ]
    for data, held, settings, n in cases:
        assert seen_examples(monkeypatch, data, held, **settings) == {n}


def test_n_must_be_told_where_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, loader: DataLoader, validation: DataLoader
) -> None:
    with pytest.raises(DataError, match="num_examples="):
        seen_examples(monkeypatch, DataLoader(Stream(loader.dataset), 50), validation)


# Data that cannot be used


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        ([], "single batch|empty"),
        ([(torch.randn(4, 1, 8, 8), torch.full((4,), 9))] * 3, "labels run from 9 to 9"),
        ([(torch.full((4, 1, 8, 8), math.nan), torch.zeros(4))] * 3, "NaN or infinite"),
        ([(torch.full((4, 1, 8, 8), math.inf), torch.zeros(4))] * 3, "NaN or infinite"),
        ([(torch.randn(4, 3, 8, 8), torch.zeros(4))] * 3, "cannot run on inputs"),
        ([torch.randn(4, 1, 8, 8)] * 3, "no target"),
        ([(torch.randn(0, 1, 8, 8), torch.zeros(0))] * 3, "batch is empty"),
        ([("a", "b")] * 3, "not understood"),
    ],
)
def test_bad_data_changes_nothing(
    trained: nn.Module, batches: list[object], match: str, untouched: Callable[..., object]
) -> None:
    bnn = bayesify.convert(trained)
    before, noise = values(bnn), bnn.noise
    for use in (
        lambda: bnn.fit(batches, progress=False),
        lambda: bnn.fit(batches, validation=batches, progress=False),
        lambda: bnn.calibrate(batches),
        lambda: bnn.evaluate(batches),
    ):
        with untouched(trained), pytest.raises(DataError, match=match):
            use()
        assert same(before, values(bnn))
        assert (bnn.noise, bnn.temperature) == (noise, 1.0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"precision": "fp8"}, "'bf16' or 'fp16'"),
        ({"groups": 0}, "groups=0"),
        ({"validations": 0}, "validations=0"),
        ({"augment": "mixup"}, "crop-flip, strong"),
        ({"ood": [1]}, "does not train on OOD"),
    ],
)
def test_bad_settings(
    bnn: bayesify.BayesianModel, loader: DataLoader, settings: dict[str, object], match: str
) -> None:
    with pytest.raises(SettingError, match=match):
        bnn.fit(loader, progress=False, **settings)


def test_a_stream_needs_its_length(bnn: bayesify.BayesianModel, loader: DataLoader) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([loader.dataset[i] for i in range(100)])

    stream = DataLoader(Stream(), batch_size=10)
    with pytest.raises(DataError, match="num_examples="):
        bnn.fit(stream, validation=list(loader), progress=False)
    result = bnn.fit(stream, validation=list(loader), progress=False, num_examples=100)
    assert result.steps == 10


# Held-out data


def test_a_tenth_is_held_out_and_never_trained_on(loader: DataLoader) -> None:
    rest, held = hold_out(loader, seed=0)
    assert len(held) == 30
    assert held.augmented
    assert len(rest.dataset) == 270
    with seeded(1):
        seen = torch.cat([x for x, _ in rest])
    held_rows = set(range(300)) - set(rest.dataset.indices)
    originals = loader.dataset.tensors[0]
    assert not any(torch.equal(originals[row], image) for row in held_rows for image in seen)


def test_loaders_that_cannot_be_split_lose_their_first_batches() -> None:
    batches = [(torch.full((2, 3), float(i)), torch.zeros(2)) for i in range(20)]
    with pytest.warns(BayesifyWarning, match="pass validation="):
        rest, held = hold_out(batches, seed=0)
    assert [inputs.args[0][0, 0].item() for inputs, _ in held.batches] == [0, 1]
    assert [x[0, 0].item() for x, _ in rest] == list(range(2, 20))
    assert len(rest) == 18


def test_knowing_the_data_by_heart_is_warned_of(
    bnn: bayesify.BayesianModel, trained: nn.Module, loader: DataLoader
) -> None:
    x = torch.cat([x for x, _ in loader])
    easy = DataLoader(TensorDataset(x, trained(x).argmax(1)), 50)
    with pytest.warns(BayesifyWarning, match="knows by heart"):
        bnn.fit(loader, validation=easy, progress=False)


def test_fit_without_validation(bnn: bayesify.BayesianModel, loader: DataLoader) -> None:
    result = bnn.fit(loader, progress=False)
    assert result.steps == 6
    assert result.nll <= min(result.network_nll, result.untrained_nll)


def test_validation_is_collected_up_to_a_limit(loader: DataLoader) -> None:
    assert len(collect(loader, 0, most=120)) == 150


def test_progress_shows_loss_and_nll(
    bnn: bayesify.BayesianModel,
    loader: DataLoader,
    validation: DataLoader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bnn.fit(loader, validation=validation)
    shown = capsys.readouterr().err
    assert "loss=" in shown
    assert "best_nll=" in shown
    assert "6/6" in shown


# Mixed precision


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_mixed_precision_on_a_processor_without_it_is_said_to_be_slow(
    bnn: bayesify.BayesianModel,
    loader: DataLoader,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BayesifyWarning)
        bnn.fit(loader, validation=loader, precision="bf16", progress=False)
    slow = [each for each in said if "Drop precision=" in str(each.message)]
    assert len(slow) == (capability == "AVX2")
    assert all(each.filename == __file__ for each in slow)


def test_bf16(bnn: bayesify.BayesianModel, loader: DataLoader, validation: DataLoader) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be vectorised.*")
        result = bnn.fit(loader, validation=validation, precision="bf16", progress=False)
        assert result.nll <= result.network_nll
        with torch.autocast("cpu", torch.bfloat16):
            mixed = bnn.predict(next(iter(validation))[0])
    whole = bnn.predict(next(iter(validation))[0])
    assert mixed.probs.dtype == torch.float32
    torch.testing.assert_close(mixed.probs, whole.probs, atol=0.05, rtol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["bayes-adapter", "bayes-adapter-outliers", "ibnn"])
def test_a_step_in_mixed_precision_is_nearly_the_same(
    trained: nn.Module,
    stripes: tuple[Tensor, Tensor],
    gradients: list[dict[int, Tensor]],
    name: str,
    precision: str,
) -> None:
    """Scaled or not, gradients reach the optimizer in their own size."""
    method, settings = PARTS[name]
    batch = [(stripes[0][:20], stripes[1][:20])]
    for mixed in (None, precision):
        bnn = bayesify.convert(trained, method)
        bnn.fit(batch, validation=batch, epochs=1, precision=mixed, progress=False, **settings)
    whole, rough = (torch.cat([g.flatten() for g in step.values()]) for step in gradients)
    assert (whole - rough).norm() < 0.1 * whole.norm()
    assert not torch.equal(whole, rough)


# Checkpoints

SCRIPT = """
import os, sys, time, torch, json
sys.path.insert(0, {tests!r})
from conftest import small_cnn
import bayesify
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(300, 1, 8, 8), torch.randint(0, 4, (300,))
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=20, shuffle=True)
class Slow:
    def __len__(self): return len(loader)
    def __iter__(self):
        for batch in loader:
            time.sleep({delay})
            yield batch
from accelerate import PartialState
from bayesify import ABNN, IBNN, BayesAdapter
from bayesify.files import write_tensors
from pathlib import Path
tensors, found = {{}}, {{}}
for method in {methods}:
    bnn = bayesify.convert(small_cnn(), method)
    ood = [x[:30] + 1] if method.takes_ood else None
    result = bnn.fit(Slow(), epochs=2, validation=[(x[:50], y[:50])], ood=ood,
                     checkpoint={checkpoint!r} + "-" + type(method).__name__,
                     checkpoint_seconds=0, progress=False, augment="crop-flip")
    tensors |= {{type(method).__name__ + n: v for n, v in bnn.posterior.tensors().items()}}
    found |= {{type(method).__name__: [result.steps, result.nll]}}
if int(os.environ.get("RANK", 0)) == 0:
    found["processes"] = PartialState().num_processes
    write_tensors(Path({out!r}), tensors, found)
"""


def script(
    checkpoint: Path,
    out: Path,
    delay: float = 0.0,
    methods: str = "[ABNN(members=2, draws=4, lr=0.05)]",
) -> str:
    return SCRIPT.format(
        tests=str(Path(__file__).parent),
        checkpoint=str(checkpoint),
        out=str(out),
        delay=delay,
        methods=methods,
    )


def test_killed_and_resumed_gives_the_same_result(tmp_path: Path) -> None:
    from bayesify.files import read_tensors

    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    subprocess.run([sys.executable, "-c", script(tmp_path / "a", whole)], check=True)
    command = [sys.executable, "-c", script(tmp_path / "b", parts, delay=0.2)]
    process = subprocess.Popen(command)
    checkpoint = tmp_path / "b-ABNN"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if checkpoint.exists() and read_tensors(checkpoint)[1]["progress"]["step"] >= 4:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not parts.exists()
    step = read_tensors(checkpoint)[1]["progress"]["step"]
    assert 4 <= step < 30
    subprocess.run([sys.executable, "-c", script(tmp_path / "b", parts)], check=True)
    (expected, one), (found, other) = read_tensors(whole), read_tensors(parts)
    assert one == other
    assert same(expected, found)


def test_two_processes_give_the_same_result(tmp_path: Path) -> None:
    from bayesify.files import read_tensors

    several = ("ABNN(members=2, draws=4, lr=0.05)", "BayesAdapter(lr=0.05)", "IBNN(lr=0.05)")
    methods = f"[{', '.join(several)}]"
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    alone = script(tmp_path / "a", one, methods=methods)
    # As many threads in both: Adam makes much of a gradient's last bits.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, "-c", alone], env=environment, check=True)
    file = tmp_path / "train.py"
    file.write_text(script(tmp_path / "b", two, methods=methods))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc_per_node", "2", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (expected, a), (found, b) = read_tensors(one), read_tensors(two)
    assert (a.pop("processes"), b.pop("processes")) == (1, 2)
    for method, (steps, nll) in a.items():
        assert b[method] == [steps, pytest.approx(nll, rel=1e-4)]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


RESUMED = {
    "abnn": (METHOD, {}),
    "bayes-adapter": (ADAPTER, {}),
    "bayes-adapter-outliers": (DOUBTING, OUTLIERS),
    "bayes-adapter-attacked": (ATTACKED, OUTLIERS),
    "bayes-adapter-groups": (ADAPTER, {"groups": 2}),
    "bayes-adapter-adapting": (BayesAdapter(draws=2, lr=0.01), {}),
    "ibnn": (SCALES, {}),
    "ibnn-adapting": (IBNN(draws=3, components=3, lr=0.01), {}),
    "ibnn-scratch": (IBNN(components=2, draws=2, lr=0.01, scratch=True), {}),
    "mean-field-vi": (MeanFieldVI(lr=0.01), {}),
}


class Interrupted:
    """A loader that breaks off at a batch."""

    def __init__(self, loader: DataLoader, last: int) -> None:
        self.loader, self.left = loader, last

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[object]:
        for batch in self.loader:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


@pytest.mark.parametrize("name", RESUMED)
def test_interrupted_and_resumed_gives_the_same_result(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path, name: str
) -> None:
    method, settings = RESUMED[name]

    def run(checkpoint: Path, data: object) -> tuple[list[object], dict[str, Tensor]]:
        bnn = bayesify.convert(trained, method)
        result = bnn.fit(
            data,
            epochs=2,
            validation=validation,
            checkpoint=checkpoint,
            checkpoint_seconds=0,
            augment="crop-flip",
            progress=False,
            **settings,
        )
        found = [result.steps, result.kept, result.nll, result.history, bnn.noise]
        return found, bnn.posterior.tensors()

    whole, expected = run(tmp_path / "a", loader)
    for last in (2, 6):  # within the first epoch, and within the second
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "b", Interrupted(loader, last))
    parts, found = run(tmp_path / "b", loader)
    assert parts == whole
    assert same(expected, found)


def test_a_rate_that_follows_the_weights_is_that_of_the_first_ones(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    # What was interrupted has the best weights so far, which are no longer the network's.
    def run(bnn: bayesify.BayesianModel, checkpoint: Path, data: object) -> None:
        bnn.fit(
            data,
            epochs=2,
            validation=validation,
            validations=2 * len(loader),
            checkpoint=checkpoint,
            checkpoint_seconds=0,
            keep="last",
            progress=False,
        )

    whole = bayesify.convert(trained, BayesAdapter(draws=2))
    run(whole, tmp_path / "a", loader)
    parts = bayesify.convert(trained, BayesAdapter(draws=2))
    with pytest.raises(KeyboardInterrupt):
        run(parts, tmp_path / "b", Interrupted(loader, 6))
    # Far enough that a rate of these would be another.
    with torch.no_grad():
        for mean in parts.posterior.mean.parameters():
            mean.mul_(2)
    run(parts, tmp_path / "b", loader)
    assert same(whole.posterior.tensors(), parts.posterior.tensors())


def test_a_finished_fit_is_not_done_again(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    def run() -> tuple[bayesify.fit_result.FitResult, dict[str, Tensor]]:
        bnn = bayesify.convert(trained, METHOD)
        return (
            bnn.fit(loader, validation=validation, checkpoint=tmp_path / "fit", progress=False),
            values(bnn),
        )

    first, second = run(), run()
    assert first[0] == second[0]
    assert same(first[1], second[1])


def test_a_checkpoint_of_another_fit_is_refused(
    bnn: bayesify.BayesianModel, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    file = tmp_path / "fit"
    bnn.fit(loader, validation=validation, checkpoint=file, progress=False)
    before = file.read_bytes()
    with pytest.raises(SettingError, match="of another fit"):
        bnn.fit(loader, validation=validation, checkpoint=file, seed=1, progress=False)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}"])
def test_a_damaged_checkpoint_is_an_error(
    bnn: bayesify.BayesianModel, loader: DataLoader, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "fit"
    file.write_bytes(content)
    before = values(bnn)
    with pytest.raises(CorruptFileError, match="truncated|damaged"):
        bnn.fit(loader, validation=list(loader), checkpoint=file, progress=False)
    assert same(before, values(bnn))
    assert file.read_bytes() == content


def test_the_last_state_is_kept_if_asked_for(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    ruinous = bayesify.convert(trained, ABNN(members=2, draws=12, noise=0.03, lr=3.0), where="*")
    best = ruinous.fit(loader, validation=validation, progress=False)
    ruinous = bayesify.convert(trained, ABNN(members=2, draws=12, noise=0.03, lr=3.0), where="*")
    last = ruinous.fit(loader, validation=validation, progress=False, keep="last")
    assert last.kept == f"step {last.steps}"
    assert last.nll == last.history[-1][2] > best.nll
    with pytest.raises(SettingError, match="keep='first' must be 'best' or 'last'"):
        ruinous.fit(loader, validation=validation, progress=False, keep="first")
