import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import bayesify
from bayesify import IBNN, NothingToRandomiseError, SettingError
from bayesify.batches import as_inputs
from bayesify.gradients import Gradients
from bayesify.methods import make_method
from bayesify.posterior import fresh_normals, key
from conftest import small_cnn

pytestmark = pytest.mark.filterwarnings("ignore:training did not help")


@pytest.fixture
def batch(stripes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return stripes[0][:12], stripes[1][:12]


class Attending(nn.Module):
    """Attention with one projection for all, and with one each."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        widths = {"kdim": 5, "vdim": 6} if separate else {}
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **widths)
        self.keys, self.values = nn.Linear(8, widths.get("kdim", 8)), nn.Linear(8, 6)
        self.head = nn.Linear(8, 3)
        self.separate = separate

    def forward(self, x: Tensor) -> Tensor:
        key, value = (self.keys(x), self.values(x)) if self.separate else (x, x)
        return self.head(self.attention(x, key, value)[0].mean(1))


# Draws


@pytest.mark.filterwarnings("ignore:.*performance drop")  # torch's advice on kernels under vmap
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bias_noise", [False, True])
def test_a_draw_is_the_network_with_scaled_columns(separate: bool, bias_noise: bool) -> None:
    """W = U diag(z) in every layer, the projections of attention among them."""
    torch.manual_seed(3)
    network = Attending(separate).eval()
    method = IBNN(components=2, draws=2, mean_std=0.5, bias_noise=bias_noise)
    bnn = bayesify.convert(network, method)
    x = torch.randn(4, 3, 8)
    bnn.strategy = "looped"
    found = bnn.predict(x, keep_draws=True, seed=1).draws
    posterior, names = bnn.posterior, {site.name: site for site in bnn.sites}
    assert ("head.bias_scale" in names) == bias_noise
    for index in range(2):
        weights = dict(network.named_parameters())
        for name, site in names.items():
            eps = bayesify.posterior.normals(posterior.shapes(), seed=1, indices=[index])[name][0]
            z = posterior.mean[name][index] + softplus(posterior.rho[name][index]) * eps
            target = site.weight or name.replace("input_scale", "weight")
            weights[target] = weights[target] * z.detach()
        with torch.no_grad():
            expected = functional_call(network, weights, (x,)).softmax(1)
        torch.testing.assert_close(found[index], expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(found[index], network(x).softmax(1), atol=1e-3)
    bnn.strategy = "vectorised"
    vectorised = bnn.predict(x, keep_draws=True, seed=1).draws
    torch.testing.assert_close(vectorised, found, atol=1e-5, rtol=1e-4)


def test_no_noise_is_the_network(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, IBNN(mean_std=0.5))
    bnn.noise = 0.0
    with torch.no_grad():
        expected = cnn(images)
        assert torch.equal(bnn.sample()(images), expected)
    torch.testing.assert_close(bnn.predict(images).probs, expected.softmax(1))


def test_sites_are_all_linear_and_convolutional_layers(cnn: nn.Module) -> None:
    plan = bayesify.plan(cnn, IBNN())
    assert [site.name for site in plan.sites] == [f"{i}.input_scale" for i in (0, 3, 8)]
    assert plan.random_numbers == 1 + 6 + 8
    latent = 2 * 4 * (1 + 6 + 8)
    weights = sum(cnn[i].weight.numel() for i in (0, 3, 8)) + 4
    assert plan.trainable == latent + weights


def test_where_restricts_scales_and_weights(cnn: nn.Module) -> None:
    bnn = bayesify.convert(cnn, IBNN(), where="8.*")
    names = {name.split(":")[1] for name in bnn.posterior.tensors()}
    assert names == {"8.input_scale", "8.weight", "8.bias"}
    attending = bayesify.convert(Attending(False), IBNN(), where="*in_proj*")
    assert set(attending.posterior.shared()) == {
        "attention.in_proj_weight",
        "attention.in_proj_bias",
    }


def test_nothing_to_scale() -> None:
    with pytest.raises(NothingToRandomiseError, match="Use BayesAdapter"):
        bayesify.convert(nn.Sequential(nn.LayerNorm(4)), IBNN())


# Training


def test_a_batch_is_split_evenly_over_components() -> None:
    method = IBNN(components=4)
    assert method.component(0, 12).tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for count in (4, 5, 50, 64):
        sizes = torch.bincount(method.component(0, count), minlength=4)
        assert sizes.max() - sizes.min() <= 1


def loop(
    network: nn.Module, bnn: bayesify.BayesianModel, x: Tensor, y: Tensor, draws: int
) -> dict[str, Tensor]:
    """Gradients of the first step of seed 0: the mean over S draws of every example alone."""
    method, posterior = bnn.method, bnn.posterior
    total = torch.zeros(())
    for turn in range(method.samples):
        seed = key("round", key("step", 0, 0), turn)
        noise = fresh_normals(posterior.shapes(), seed=seed, count=draws)
        for i in range(len(x)):
            own = i * draws // len(x)
            component = own * method.components // draws
            weights = dict(posterior.shared())
            for name, eps in noise.items():
                z = posterior.mean[name][component]
                z = z + softplus(posterior.rho[name][component]) * eps[own]
                weight = name.replace("input_scale", "weight")
                shape = (1, -1, *(1 for _ in weights[weight].shape[2:]))
                weights[weight] = weights[weight] * z.view(shape)
            output = functional_call(network, weights, (x[i : i + 1],))
            loss = nn.functional.cross_entropy(output, y[i : i + 1])
            total = total + loss / len(x) / method.samples
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize(("groups", "draws"), [(None, 12), (6, 6), (3, 3), (1, 3)])
def test_gradients_are_those_of_a_loop(
    trained: nn.Module,
    batch: tuple[Tensor, Tensor],
    gradients: list[dict[int, Tensor]],
    groups: int | None,
    draws: int,
) -> None:
    x, y = batch
    still = {"lr": 0.0, "latent_lr": 0.0, "weight_decay": 0.0, "adapt_statistics": False}
    bnn = bayesify.convert(trained, IBNN(components=3, draws=3, mean_std=0.2, **still))
    expected = loop(trained, bnn, x, y, draws)
    result = bnn.fit([batch], validation=[batch], epochs=1, progress=False, groups=groups)
    assert result.groups == (None if groups is None else draws)
    for name, parameter in bnn.posterior.named_parameters():
        # At the first step beta is 0: the KL adds nothing.
        torch.testing.assert_close(
            gradients[0][id(parameter)], expected[name], atol=1e-5, rtol=1e-3
        )


@pytest.mark.parametrize(("asked", "done"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_groups_are_as_many_for_each_component(
    trained: nn.Module, batch: tuple[Tensor, Tensor], asked: int, done: int
) -> None:
    bnn = bayesify.convert(trained, IBNN())
    result = bnn.fit([batch], validation=[batch], groups=asked, progress=False)
    assert result.groups == done
    assert f"({done} draws a batch)" in str(result)


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.parametrize("separate", [False, True])
def test_attention_trains_with_a_draw_for_each_example(separate: bool) -> None:
    bnn = bayesify.convert(Attending(separate).eval(), IBNN(lr=0.01))
    before = {name: value.clone() for name, value in bnn.posterior.named_parameters()}
    x, y = torch.randn(8, 3, 8), torch.arange(8) % 3
    result = bnn.fit([(x, y)] * 10, validation=[(x, y)], progress=False)
    assert result.groups is None
    assert result.nll < result.untrained_nll
    unused = () if separate else ("keys", "values")
    for name, value in bnn.posterior.named_parameters():
        if not any(layer in name for layer in unused):
            assert not torch.equal(value, before[name]), name


def test_beta_rises_over_the_first_two_thirds(cnn: nn.Module) -> None:
    posterior = bayesify.convert(cnn, IBNN()).posterior
    kl = posterior.kl(0.1).item()
    method = IBNN(prior_std=0.1)
    for progress, beta in ((0, 0), (1 / 3, 0.5), (2 / 3, 1), (0.9, 1), (1, 1)):
        found = method.penalty(posterior, progress, 50).item()
        assert found == pytest.approx(beta * kl / 50, rel=1e-5)


def test_the_kl_is_added_once_a_step(
    trained: nn.Module, batch: tuple[Tensor, Tensor], gradients: list[dict[int, Tensor]]
) -> None:
    """Nothing moves and hardly anything is random: steps differ by beta, 0, 1/2 and 1."""
    still = {"lr": 0.0, "latent_lr": 0.0, "weight_decay": 0.0, "std": (1e-4, 0.0)}
    method = IBNN(components=2, draws=2, prior_std=0.01, adapt_statistics=False, **still)
    bnn = bayesify.convert(trained, method)
    few = {"num_examples": 36, "epochs": 1, "accumulate": 2}
    bnn.fit([batch] * 3, validation=[batch], progress=False, **few)
    kl = torch.autograd.grad(bnn.posterior.kl(0.01), list(bnn.posterior.mean.parameters()))
    for parameter, share in zip(bnn.posterior.mean.parameters(), kl, strict=True):
        first, second, third = (step[id(parameter)] for step in gradients)
        torch.testing.assert_close(second - first, 0.5 * share / 36, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(third - first, share / 36, atol=2e-3, rtol=1e-3)


def test_rates() -> None:
    method = IBNN()
    assert method.rates(0.0) == [1.0, 1.0]
    latent = [method.rates(progress)[1] for progress in (1 / 3, 0.5, 2 / 3, 1)]
    assert latent == pytest.approx([1, 0.625, 0.25, 0.25])


def test_the_latent_distributions_have_no_weight_decay(cnn: nn.Module) -> None:
    posterior = bayesify.convert(cnn, IBNN()).posterior
    method = IBNN(lr=1e-4, latent_lr=0.2, weight_decay=0.01)
    weights, latent = method.optimizer(posterior, 10).param_groups
    assert (weights["lr"], weights["weight_decay"]) == (1e-4, 0.01)
    assert (latent["lr"], latent["weight_decay"]) == (0.2, 0)
    assert {id(p) for p in weights["params"]} == {id(p) for _, p in posterior.weights.items()}
    assert len(weights["params"]) + len(latent["params"]) == len(list(posterior.parameters()))


def test_fit_trains_weights_slowly_and_they_come_back(
    trained: nn.Module, loader: DataLoader, validation: DataLoader, tmp_path: Path
) -> None:
    method = IBNN(lr=1e-3, latent_lr=0.1)
    bnn = bayesify.convert(trained, method)
    result = bnn.fit(loader, epochs=4, validation=validation, temper=False, progress=False)
    assert result.kept.startswith("step")
    assert result.nll < result.network_nll
    original = trained.state_dict()
    for name, weight in bnn.posterior.weights.items():
        moved = (weight - original[name]).norm() / original[name].norm()
        assert 0 < moved < 0.1, name

    x = next(iter(validation))[0]
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", trained)
    assert torch.equal(loaded.predict(x).probs, bnn.predict(x).probs)
    for name, weight in loaded.posterior.weights.items():
        assert torch.equal(weight, bnn.posterior.weights[name])
        assert torch.equal(bnn.sample().get_parameter(name), weight)
    drawn = bnn.predict(x, draws=4, keep_draws=True).draws
    with torch.no_grad():
        torch.testing.assert_close(bnn.sample(index=2)(x).softmax(1), drawn[2])
    bnn.noise = 0.0
    with torch.no_grad():
        assert not torch.equal(bnn.sample()(x), trained(x)), "U has trained"


def test_more_components_than_examples_change_nothing(
    trained: nn.Module, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    # Components so far apart that the network itself would win: its noise must not become 0.
    bnn = bayesify.convert(trained, IBNN(components=13, draws=13, mean_std=3.0))
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    with pytest.raises(SettingError, match=r"12 examples cannot be split over 13 components"):
        bnn.fit([batch], validation=[batch], progress=False, checkpoint=tmp_path / "fit")
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    assert bnn.noise == 1
    assert not (tmp_path / "fit").exists()


def test_a_short_last_batch_may_be_smaller_than_the_components(
    trained: nn.Module, stripes: tuple[Tensor, Tensor], validation: DataLoader
) -> None:
    x, y = stripes
    batches = [(x[:20], y[:20]), (x[20:22], y[20:22]), (x[22:23], y[22:23])]
    bnn = bayesify.convert(trained, IBNN())
    result = bnn.fit(batches, validation=validation, epochs=1, progress=False)
    assert result.steps == 3
    assert result.groups is None


# From scratch


def test_from_scratch(
    loader: DataLoader, validation: DataLoader, test_set: DataLoader, tmp_path: Path
) -> None:
    network = small_cnn()
    method = IBNN(mean_std=0.5, scratch=True, lr=0.2, latent_lr=0.05)
    bnn = bayesify.convert(network, method)
    parameters = dict(network.named_parameters())
    assert set(bnn.posterior.weights) == set(parameters), "all train"
    own = {name: value.clone() for name, value in network.state_dict().items()}
    result = bnn.fit(loader, epochs=14, validation=validation, progress=False)
    assert result.groups == 4
    assert result.kept.startswith("step")
    report = bnn.evaluate(test_set)
    assert report.accuracy > 0.6  # by chance 0.25; a plain network reaches 0.8
    assert report.nll < math.log(4)
    for name in ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var"):
        assert not torch.equal(bnn.posterior.statistics[name], own[name]), name
        assert torch.equal(network.state_dict()[name], own[name]), name
        assert torch.equal(bnn.sample().state_dict()[name], bnn.posterior.statistics[name])

    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", network)
    x = next(iter(test_set))[0]
    assert torch.equal(loaded.predict(x).probs, bnn.predict(x).probs)


def test_a_checkpoint_keeps_its_statistics_if_asked(cnn: nn.Module) -> None:
    assert not list(bayesify.convert(cnn, IBNN(adapt_statistics=False)).posterior.statistics)
    assert IBNN(adapt_statistics=False, scratch=True).adapts_statistics


# Gates with a row for each example


class TimeFirst(nn.Module):
    """Its linear layers see sequences before examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.transpose(0, 1)).tanh().mean(0))


def test_rows_are_what_vmap_does(
    trained: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = IBNN(components=2, draws=2, mean_std=0.3, std=(0.3, 0.0), adapt_statistics=False)
    found = []
    for rows in (True, False):
        with monkeypatch.context() as patched:
            if not rows:
                patched.setattr(Gradients, "_runs_by_rows", lambda *_: False)
            gradients = Gradients(bayesify.convert(trained, method), None, None, None, 0)
            found.append(gradients.vector(as_inputs(batch[0]), batch[1], 7))
            assert list(gradients.by_rows.values()) == [rows]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [3, 5])
def test_rows_only_where_they_are_of_examples(steps: int) -> None:
    """Three steps for three examples: shapes go together, and values do not."""
    bnn = bayesify.convert(TimeFirst().eval(), IBNN(components=2, draws=2))
    gradients = Gradients(bnn, None, None, None, 0)
    gradients.vector(as_inputs(torch.randn(6, steps, 4)), torch.arange(6) % 3, 0)
    assert list(gradients.by_rows.values()) == [False]
    assert gradients.groups is None


def test_statistics_adapt_to_the_whole_batch(
    trained: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    """Every example has a draw of its own, and still they are normalised together."""
    method = IBNN(components=2, draws=2, std=(1e-4, 0.0), mean_std=0.0, samples=1)
    bnn = bayesify.convert(trained, method)
    result = bnn.fit([batch], validation=[batch], epochs=1, keep="last", progress=False)
    assert result.groups is None
    plain = copy.deepcopy(trained).train()
    plain(batch[0])
    for name, statistic in bnn.posterior.statistics.items():
        torch.testing.assert_close(statistic, plain.state_dict()[name], atol=1e-3, rtol=1e-2)


def test_statistics_do_not_adapt_to_one_example() -> None:
    """It may have no variance, and a network can refuse it."""
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    bnn = bayesify.convert(network, IBNN(components=2, draws=2))
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    assert bnn.fit(batches, validation=batches, epochs=1, progress=False).steps == 2


# Settings


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"samples": 0}, "samples=0"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"components": 0}, "components=0"),
        ({"components": 3}, "draws=20 is not a multiple of the 3"),
        ({"prior_std": 0}, "prior_std=0"),
        ({"prior_std": -1}, "prior_std=-1"),
        ({"prior_std": math.inf}, "prior_std=inf"),
        ({"mean_std": -0.1}, "mean_std=-0.1"),
        ({"std": (0.05,)}, "two finite numbers"),
        ({"std": (math.nan, 0.1)}, "two finite numbers"),
        ({"std": 0.05}, "std=0.05"),
        ({"lr": -1}, "lr=-1"),
        ({"latent_lr": -1}, "latent_lr=-1"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"draws": 0}, "draws=0"),
    ],
)
def test_bad_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        IBNN(**settings)


def test_settings_come_back_from_json() -> None:
    method = IBNN(std=(0.1, 0.01), components=2, bias_noise=True, scratch=True)
    assert make_method("ibnn", json.loads(json.dumps(method.to_dict()))) == method
