"""Laplace: its covariance against laplace-torch's own and against Hessians in closed form."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayesify
from architectures import Recurrent
from bayesify import Classification, Laplace, Regression
from bayesify.batches import Inputs
from bayesify.methods import curvature, laplace, make_method

laplace_torch = laplace.import_laplace()  # part of the test environment: a failure if missing

# The network itself may be better than what is computed, and then it is kept.
pytestmark = pytest.mark.filterwarnings("ignore:training did not help")
CLASSES = 3


def classifier(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(40, 4, dtype=torch.float64)


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(0, CLASSES, (40,))


def batches(x: Tensor, y: Tensor, size: int = 16) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fitted(
    network: nn.Module, method: Laplace, loader: Any, likelihood: Any = "classification"
) -> bayesify.BayesianModel:
    bnn = bayesify.convert(network, method, likelihood=likelihood)
    bnn.fit(loader, validation=list(loader), progress=False)
    return bnn


def covariance(bnn: bayesify.BayesianModel) -> Tensor:
    """Of all random numbers, by the sites one after another."""
    stored = list(bnn.posterior.tensors().values())
    if bnn.posterior.full:
        root = torch.cat(stored)
        return root @ root.T
    return torch.cat([value.flatten() for value in stored]).square().diag()


def theirs(
    network: nn.Module, loader: DataLoader, subset: str, structure: str, kind: str, **settings: Any
) -> Any:
    """What laplace-torch computes by itself, with its own backend."""
    found = laplace_torch.Laplace(network, kind, subset, structure, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.fit(loader)
        found.optimize_prior_precision(method="marglik")
    return found


def exact(nll: Callable[[Tensor], Tensor], weights: Tensor, prior_precision: float) -> Tensor:
    """Inverse of the Hessian of the loss plus the prior: for a linear model, the posterior."""
    return torch.linalg.inv(hessian(nll, weights) + prior_precision * torch.eye(len(weights)))


# The covariance


def test_last_layer_is_that_of_laplace_torch(inputs: Tensor, labels: Tensor) -> None:
    network, loader = classifier(), batches(inputs, labels)
    bnn = fitted(network, Laplace(), loader)
    expected = theirs(network, loader, "last_layer", "full", "classification")
    assert expected.posterior_covariance.shape == (21, 21)
    torch.testing.assert_close(covariance(bnn), expected.posterior_covariance, rtol=1e-6, atol=1e-7)
    assert bool((covariance(bnn) - covariance(bnn).diag().diag()).abs().max() > 1e-3)


def test_last_layer_of_regression_is_that_of_laplace_torch(inputs: Tensor) -> None:
    network, target = classifier(2), torch.randn(40, 2, dtype=torch.float64)
    loader = batches(inputs, target)
    bnn = fitted(network, Laplace(), loader, "regression")
    std = math.exp(bnn.likelihood.log_variance.item() / 2)
    expected = theirs(network, loader, "last_layer", "full", "regression", sigma_noise=std)
    torch.testing.assert_close(covariance(bnn), expected.posterior_covariance, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("subset", ["last-layer", "all"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_diagonal_is_that_of_laplace_torch(
    inputs: Tensor, labels: Tensor, subset: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laplace, "LARGEST_FULL", 20)
    monkeypatch.setattr(curvature, "LARGEST_GRADIENTS", 4 * 51)  # four examples at a time
    network = classifier()
    target = labels if kind == "classification" else inputs[:, :3] ** 2
    loader = batches(inputs, target)
    bnn = fitted(network, Laplace(subset=subset), loader, kind)
    assert not bnn.posterior.full
    settings = {}
    if kind == "regression":
        settings["sigma_noise"] = math.exp(bnn.likelihood.log_variance.item() / 2)
    expected = theirs(network, loader, subset.replace("-", "_"), "diag", kind, **settings)
    found = covariance(bnn).diag()
    assert len(found) == (21 if subset == "last-layer" else 51)
    torch.testing.assert_close(found, expected.posterior_variance, rtol=1e-6, atol=1e-7)


def test_logistic_regression_is_exact(inputs: Tensor, labels: Tensor) -> None:
    network = nn.Linear(4, CLASSES).double()

    def nll(weights: Tensor) -> Tensor:
        logits = inputs @ weights[:12].view(CLASSES, 4).T + weights[12:]
        return functional.cross_entropy(logits, labels, reduction="sum")

    weights = torch.cat([network.weight.flatten(), network.bias]).detach()
    bnn = fitted(network, Laplace(prior_precision=0.7), batches(inputs, labels))
    torch.testing.assert_close(covariance(bnn), exact(nll, weights, 0.7))
    # The diagonal is inverted by itself.
    alone = fitted(network, Laplace(subset="all", prior_precision=0.7), batches(inputs, labels))
    precision = hessian(nll, weights).diag() + 0.7
    torch.testing.assert_close(covariance(alone).diag(), 1 / precision)


@pytest.mark.parametrize("subset", ["last-layer", "all"])
def test_yes_or_no_is_exact(inputs: Tensor, subset: str) -> None:
    network, target = nn.Linear(4, 1, bias=False).double(), (inputs[:, :1] > 0).double()

    def nll(weights: Tensor) -> Tensor:
        logits = (inputs @ weights).unsqueeze(1)
        return functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")

    method = Laplace(subset=subset, prior_precision=2)
    bnn = fitted(network, method, batches(inputs, target), "binary")
    expected = exact(nll, network.weight.detach().flatten(), 2)
    if subset == "all":
        expected = (1 / (hessian(nll, network.weight.detach().flatten()).diag() + 2)).diag()
    torch.testing.assert_close(covariance(bnn), expected)


def test_a_layer_after_the_last_that_changes_no_probability(inputs: Tensor, labels: Tensor) -> None:
    plain = classifier()
    network = nn.Sequential(*plain, nn.LogSoftmax(dim=1))
    method = Laplace(prior_precision=1.0)
    a, b = (fitted(net, method, batches(inputs, labels)) for net in (plain, network))
    torch.testing.assert_close(covariance(a), covariance(b))


def test_single_precision_inverts_a_weak_prior(trained: nn.Module, loader: DataLoader) -> None:
    bnn = fitted(trained, Laplace(prior_precision=1e-4), loader)
    assert bnn.posterior.root["8.weight"].dtype == torch.float32
    directions = covariance(bnn)  # adding the same to all classes changes nothing but the prior
    bias = torch.cat([torch.zeros(32), torch.full((4,), 0.5)])
    assert (bias @ directions @ bias).item() == pytest.approx(1e4, rel=1e-2)


def test_only_what_where_names(inputs: Tensor, labels: Tensor) -> None:
    network, method = classifier(), Laplace(prior_precision=1.0)
    bnn = bayesify.convert(network, method, where="*.bias")
    bnn.fit(batches(inputs, labels), validation=batches(inputs, labels), progress=False)
    whole = fitted(network, method, batches(inputs, labels))
    precision = torch.linalg.inv(covariance(whole))[18:, 18:]
    torch.testing.assert_close(covariance(bnn), torch.linalg.inv(precision))


# Draws


def test_draws_have_the_covariance(inputs: Tensor, labels: Tensor) -> None:
    bnn = fitted(classifier(), Laplace(), batches(inputs, labels))
    bnn.noise = 1.0
    drawn = bnn.posterior.draws(0, range(4000))
    flat = torch.cat([value.flatten(1) for value in drawn.values()], dim=1)
    expected = covariance(bnn)
    mean = torch.cat([value.flatten() for _, value in bnn.posterior.mean.items()])
    variances = expected.diag()
    errors = (flat.mean(0) - mean) / (variances / len(flat)).sqrt()
    assert errors.abs().max() < 4.5
    scatter = (flat - mean).T @ (flat - mean) / len(flat)
    spread = ((variances.outer(variances) + expected.square()) / len(flat)).sqrt()
    assert ((scatter - expected) / spread).abs().max() < 4.5


@pytest.mark.parametrize("subset", ["last-layer", "all"])
def test_noise_scales_draws_and_a_draw_is_the_same_alone(
    trained: nn.Module, loader: DataLoader, subset: str
) -> None:
    bnn = fitted(trained, Laplace(subset=subset), loader)
    bnn.noise = 1.0
    once = bnn.posterior.draws(3, range(7))
    alone = bnn.posterior.draws(3, [5])
    assert all(torch.equal(value[5], alone[name][0]) for name, value in once.items())
    bnn.noise = 0.5
    for name, half in bnn.posterior.draws(3, range(7)).items():
        mean = bnn.posterior.mean[name]
        torch.testing.assert_close(half - mean, 0.5 * (once[name] - mean), rtol=1e-3, atol=1e-6)
    bnn.noise = 0.0
    state = trained.state_dict()
    for name, still in bnn.posterior.draws(3, range(2)).items():
        assert torch.equal(still[1], state[name])


@pytest.mark.parametrize("subset", ["last-layer", "all"])
def test_vectorised_and_looped_agree(
    trained: nn.Module, loader: DataLoader, images: Tensor, subset: str
) -> None:
    bnn = fitted(trained, Laplace(subset=subset), loader)
    bnn.noise = 1.0
    predictions = []
    for strategy in ("vectorised", "looped"):
        bnn.strategy = strategy
        predictions.append(bnn.predict(images))
    torch.testing.assert_close(predictions[0].probs, predictions[1].probs, rtol=0, atol=1e-5)
    assert predictions[0].epistemic.max() > 1e-4


# Fitting


def test_before_fit_it_is_the_network(trained: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(trained, Laplace())
    assert bnn.noise == 1
    p = bnn.predict(images, draws=3, keep_draws=True)
    assert torch.equal(p.draws[0], p.draws[2])
    assert torch.equal(bnn.sample()(images), trained(images))
    assert not bnn.trainable()


def test_fit_leaves_the_network_and_helps(untouched: Callable[..., Any]) -> None:
    x = torch.randn(1200, 4)
    y = (x @ torch.randn(4, 3) + torch.randn(1200, 3)).argmax(1)
    train, validation, test = (
        batches(x[a:b], y[a:b]) for a, b in ((0, 200), (200, 700), (700, 1200))
    )
    network = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(100):  # too many for so few examples
        optimizer.zero_grad()
        functional.cross_entropy(network(x[:200]), y[:200]).backward()
        optimizer.step()
    with untouched(network):
        bnn = bayesify.convert(network, Laplace())
        before = bnn.evaluate(test)
        result = bnn.fit(train, validation=validation, progress=False)
        after = bnn.evaluate(test)
    assert (result.kept, bnn.noise, result.steps) == ("solved", 1.0, 0)
    assert result.seconds > 0
    assert result.nll < result.network_nll
    assert after.nll < before.nll
    assert after.ece < before.ece
    assert not any(m._forward_hooks for m in bnn.runner.replicas.get().modules())


def test_what_is_computed_is_kept_where_the_network_is_better(
    trained: nn.Module, loader: DataLoader, validation: DataLoader
) -> None:
    bnn = bayesify.convert(trained, Laplace(prior_precision=0.01, subset="all"))
    with pytest.warns(bayesify.BayesifyWarning, match="Calibrate on held-out data"):
        result = bnn.fit(loader, validation=validation, progress=False)
    assert (result.kept, bnn.noise) == ("network", 0.0)
    assert all(value.abs().max() > 0 for value in bnn.posterior.tensors().values())
    chosen = bnn.calibrate(validation)
    assert bnn.noise == chosen.noise
    assert chosen.nll <= result.network_nll


def test_one_seed_one_result_and_endless_loaders_end(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], validation: DataLoader
) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            while True:
                row = int(torch.randint(0, 300, ()))
                yield stripes[0][row], stripes[1][row]

    found = []
    for seed in (0, 0, 1):
        bnn = bayesify.convert(trained, Laplace())
        bnn.fit(
            DataLoader(Endless(), batch_size=50),
            validation=validation,
            num_examples=100,
            seed=seed,
            progress=False,
        )
        found.append(covariance(bnn))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_ignored_labels_do_not_count(inputs: Tensor, labels: Tensor) -> None:
    network, method, likelihood = classifier(), Laplace(), Classification(ignore_index=9)
    some = labels.clone()
    some[5:20] = 9
    rows = some != 9
    with_them = fitted(network, method, batches(inputs, some, 10), likelihood)
    without = fitted(network, method, batches(inputs[rows], labels[rows]), likelihood)
    torch.testing.assert_close(covariance(with_them), covariance(without))
    nothing = [(Inputs((inputs,), {}), torch.full((40,), 9))]
    with pytest.raises(bayesify.DataError, match="all are ignored"):
        method.solve(with_them, nothing, [])


class Two(nn.Module):
    """Takes two tensors, one by name, and gives a dict."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, a: Tensor, *, b: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(torch.cat([a, b], dim=1))}


@pytest.mark.parametrize("subset", ["last-layer", "all"])
def test_any_inputs_and_outputs(inputs: Tensor, labels: Tensor, subset: str) -> None:
    network, method = classifier(), Laplace(subset=subset)
    plain = fitted(network, method, batches(inputs, labels))
    rows = [slice(0, 25), slice(25, 40)]
    parts = [{"a": inputs[r, :3], "b": inputs[r, 3:], "labels": labels[r]} for r in rows]
    bnn = fitted(Two(network), method, parts)
    torch.testing.assert_close(covariance(bnn), covariance(plain), rtol=1e-6, atol=1e-7)


def test_values_without_a_dimension(inputs: Tensor) -> None:
    network = nn.Sequential(classifier(1), nn.Flatten(0))
    loader = batches(inputs, inputs[:, 0])
    flat = fitted(network, Laplace(prior_precision=1.0), loader, "regression")
    column = fitted(classifier(1), Laplace(prior_precision=1.0), loader, "regression")
    torch.testing.assert_close(covariance(flat), covariance(column))


def test_a_network_that_cannot_be_vectorised() -> None:
    network, target = Recurrent().eval(), torch.randint(0, 5, (8,))
    loader = [(torch.randn(8, 5, 6), target), (torch.randn(8, 5, 6), target)]
    bnn = fitted(network, Laplace(), loader)
    assert covariance(bnn).diag().min() > 0
    every = bayesify.convert(network, Laplace(subset="all"))
    every.strategy = "looped"
    with pytest.raises(bayesify.UnsupportedNetworkError, match="cannot be vectorised"):
        every.fit(loader, validation=loader, progress=False)


# Files, settings and what cannot be


@pytest.mark.parametrize("subset", ["last-layer", "all"])
def test_saved_and_loaded_without_laplace_torch(
    trained: nn.Module,
    loader: DataLoader,
    images: Tensor,
    subset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bnn = fitted(trained, Laplace(subset=subset), loader)
    bnn.noise = 0.7
    monkeypatch.setitem(sys.modules, "laplace", None)
    bnn.save(tmp_path / "here")
    loaded = bayesify.load(tmp_path / "here", trained)
    assert loaded.method == bnn.method
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)
    assert loaded.predict(images).epistemic.max() > 1e-4
    stored = set(loaded.posterior.tensors())
    assert stored == {f"root:{site.name}" for site in bnn.sites}


def test_missing_library(
    trained: nn.Module, loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    bnn = bayesify.convert(trained, Laplace())
    with pytest.raises(bayesify.MissingExtraError, match=r"pip install 'bayesify\[laplace\]'"):
        bnn.fit(loader, validation=loader, progress=False)


def test_settings_round_trip() -> None:
    method = Laplace(subset="all", prior_precision=3.5, draws=5)
    assert make_method("laplace", json.loads(json.dumps(method.to_dict()))) == method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subset": "first"}, "subset='first' must be one of last-layer, all"),
        ({"prior_precision": 0.0}, "prior_precision=0.0 must be a finite number above 0"),
        ({"prior_precision": "1"}, "prior_precision='1' must be"),
        ({"noise": -1.0}, "noise=-1.0"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(bayesify.SettingError, match=message):
        Laplace(**settings)


def test_what_is_found() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3, bias=False))
    planned = bayesify.plan(network, Laplace())
    assert [site.name for site in planned.sites] == ["2.weight"]
    assert planned.shares_trunk
    assert planned.bytes == 4 * 6 * 6
    every = bayesify.plan(network, Laplace(subset="all"))
    assert (len(every.sites), every.bytes, every.shares_trunk) == (3, 4 * 12, False)
    large = bayesify.plan(nn.Linear(100, 100), Laplace())
    assert large.bytes == 4 * 10_100
    with pytest.raises(bayesify.NothingToRandomiseError, match=r"subset='all'"):
        bayesify.plan(nn.Conv2d(1, 2, 3), Laplace())


def test_a_shared_layer_is_refused() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    with pytest.raises(bayesify.UnsupportedNetworkError, match=r"0.weight = 2.weight"):
        bayesify.convert(network, Laplace())
    assert len(bayesify.convert(network, Laplace(subset="all")).sites) == 3


def test_shared_weights_count_in_both_places(inputs: Tensor) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    network[2].weight = network[0].weight
    target = torch.randint(0, 4, (40,))
    bnn = fitted(network, Laplace(subset="all", prior_precision=1.0), batches(inputs, target))

    def logits(weight: Tensor) -> Tensor:
        return torch.tanh(inputs @ weight.T + network[0].bias) @ weight.T + network[2].bias

    jacobian = torch.autograd.functional.jacobian(logits, network[0].weight.detach()).flatten(2)
    p = logits(network[0].weight).softmax(1).detach()
    second = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    precision = torch.einsum("bcp,bck,bkp->p", jacobian, second, jacobian) + 1
    found = bnn.posterior.root["0.weight"].flatten().square()
    torch.testing.assert_close(found, 1 / precision)


class Dense(nn.Module):
    """A label for each of two pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).unflatten(1, (3, 2))


@pytest.mark.parametrize(
    ("network", "outputs", "likelihood", "error", "message"),
    [
        (Dense(), (2,), "classification", bayesify.DataError, "one label an example"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
            (),
            "classification",
            bayesify.UnsupportedNetworkError,
            "'0', does not give the network's output",
        ),
        (nn.Linear(4, 3), (3,), "multilabel", bayesify.SettingError, "this is Multilabel"),
        (
            nn.Linear(4, 2),
            (),
            Regression(heteroscedastic=True),
            bayesify.SettingError,
            "one noise level",
        ),
    ],
)
def test_what_cannot_be_fitted(
    network: nn.Module,
    outputs: tuple[int, ...],
    likelihood: Any,
    error: type[Exception],
    message: str,
) -> None:
    loader = batches(torch.randn(20, 4), torch.randint(0, 2, (20, *outputs)))
    bnn = bayesify.convert(network, Laplace(), likelihood=likelihood)
    with pytest.raises(error, match=message):
        bnn.fit(loader, validation=loader, progress=False)
    assert all(value.abs().max() == 0 for value in bnn.posterior.tensors().values())


def test_a_layer_that_runs_twice_is_refused(inputs: Tensor) -> None:
    layer = nn.Linear(4, 4).double()
    target = torch.randint(0, 4, (40,))
    bnn = bayesify.convert(nn.Sequential(layer, nn.Tanh(), layer), Laplace())
    with pytest.raises(bayesify.UnsupportedNetworkError, match="runs 2 times"):
        bnn.fit(batches(inputs, target), validation=batches(inputs, target), progress=False)
