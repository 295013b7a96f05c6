import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

from bayesify.posterior import (
    POOL,
    Fixed,
    Latent,
    MeanField,
    Members,
    Posterior,
    fresh_normals,
    gaussian_kl,
    key,
    normals,
)
from bayesify.sites import Site

SITES = [Site("a.weight", (3,), "Norm", 0.0, ("a.bias",)), Site("b.weight", (2, 2), "Norm", 1.0)]
TENSORS = {
    "a.weight": torch.tensor([0.5, -1.0, 2.0]),
    "a.bias": torch.tensor([0.1, 0.2, 0.3]),
    "b.weight": torch.tensor([[0.1, -0.3], [0.0, 0.7]]),
}


def members(noise: float = 0.1, count: int = 2) -> Members:
    return Members(SITES, TENSORS, count, noise)


@given(
    seed=st.integers(0, 2**40),
    indices=st.lists(st.integers(0, 500), min_size=1, max_size=6),
)
def test_a_draw_depends_on_seed_and_index_alone(seed: int, indices: list[int]) -> None:
    together = members().draws(seed, indices)
    for row, index in enumerate(indices):
        alone = members().draws(seed, [index])
        assert all(torch.equal(together[name][row], alone[name][0]) for name in alone)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_of_a_component_come_in_mirrored_pairs(count: int) -> None:
    posterior = members(noise=0.3, count=count)
    with torch.no_grad():
        for value in posterior.values.parameters():
            value.add_(torch.arange(float(count)).view(-1, *[1] * (value.ndim - 1)))
        draws = posterior.draws(4, range(4 * count))["a.weight"].unflatten(0, (4, count))
    means = posterior.values["a.weight"].detach()
    for first, second in ((0, 1), (2, 3)):
        torch.testing.assert_close((draws[first] + draws[second]) / 2, means)
    assert not torch.allclose(draws[0], draws[2])
    assert not torch.allclose(draws[1], draws[2])


def test_mirrored_pairs_average_out_what_is_linear_in_the_noise() -> None:
    """The mean of a nearly linear function needs far fewer draws than independent ones would."""
    posterior = members(noise=0.03, count=1)
    weights = torch.tensor([1.0, -2.0, 0.5])

    def spread(indices: list[list[int]]) -> float:
        with torch.no_grad():
            draws = [posterior.draws(seed, i)["a.weight"] for seed, i in enumerate(indices)]
        return torch.stack([(d @ weights).exp().mean() for d in draws]).std().item()

    pairs = spread([[0, 1, 2, 3]] * 200)
    independent = spread([[0, 2, 4, 6]] * 200)
    assert pairs < independent / 4


def test_draws_are_the_same_in_another_process() -> None:
    code = (
        "from bayesify.posterior import normals; print(normals({'w': (2,)}, seed=5, indices=[7]))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(normals({"w": (2,)}, seed=5, indices=[7]))


def test_keys_are_fixed_for_ever() -> None:
    assert key("draw", 0, 0, "a.weight") == 227163792561219441
    assert 0 <= key("x") < 2**63


def test_different_seeds_sites_and_indices_differ() -> None:
    a = normals({"w": (4,), "v": (4,)}, seed=0, indices=[0, 1])
    b = normals({"w": (4,)}, seed=1, indices=[0])
    rows = [a["w"][0], a["w"][1], a["v"][0], b["w"][0]]
    assert len({tuple(row.tolist()) for row in rows}) == 4


def test_no_noise_gives_the_tensors_bit_for_bit() -> None:
    draws = members(noise=0.0).draws(0, range(4))
    for name, tensor in TENSORS.items():
        assert torch.equal(draws[name], tensor.expand(4, *tensor.shape))


def test_moments_are_those_of_the_paper() -> None:
    """gamma (1 + alpha eps) has mean gamma and standard deviation alpha |gamma|; beta has none."""
    count, noise = 20_000, 0.3
    posterior = members(noise, count=1)
    draws = posterior(
        torch.zeros(count, dtype=torch.long),
        fresh_normals(posterior.shapes(), seed=0, count=count),
    )
    for name, offset in (("a.weight", 0.0), ("b.weight", 1.0)):
        gamma = (offset + TENSORS[name]).abs()
        error = 5 * noise * gamma / math.sqrt(count)
        assert ((draws[name].mean(0) - TENSORS[name]).abs() <= error).all()
        spread = draws[name].std(0)
        assert ((spread - noise * gamma).abs() <= error).all()
    assert torch.equal(draws["a.bias"].std(0), torch.zeros(3))


def test_components_take_turns() -> None:
    posterior = members(noise=0.0)
    with torch.no_grad():
        posterior.values["a.bias"][1] += 1
    bias = posterior.draws(0, range(4))["a.bias"]
    assert torch.equal(bias[0], bias[2])
    torch.testing.assert_close(bias[1], bias[0] + 1)


def test_only_the_members_tensors_are_parameters() -> None:
    assert set(members().tensors()) == set(TENSORS)
    assert sum(p.numel() for p in members().parameters()) == 2 * (3 + 3 + 4)


def test_gradients_reach_the_member_that_was_drawn() -> None:
    posterior = members()
    draws = posterior(torch.tensor([1]), fresh_normals(posterior.shapes(), seed=0, count=1))
    sum(value.sum() for value in draws.values()).backward()
    for _, parameter in posterior.values.items():
        assert (parameter.grad[0] == 0).all()
        assert (parameter.grad[1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_draws_have_the_networks_type(dtype: torch.dtype) -> None:
    draws = members().to(dtype).draws(0, [0])
    assert all(value.dtype == dtype for value in draws.values())


# Independent Gaussians

WEIGHTS = {"w": torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.2, 0.3]]), "b": torch.tensor([0.7, -0.3])}
WEIGHT_SITES = [Site(name, tuple(value.shape), "Linear") for name, value in WEIGHTS.items()]
# For the moments of many draws: one number, and the same number 10,000 times.
WIDE = {"w": torch.full((10_000,), 0.4)}
WIDE_SITES = [Site("w", (10_000,), "Linear")]


def mean_field(log_std: tuple[float, float] = (-6.0, -5.0), noise: float = 1.0) -> MeanField:
    return MeanField(WEIGHT_SITES, WEIGHTS, dict.fromkeys(WEIGHTS, log_std), noise)


def test_mean_field_has_the_moments_it_should() -> None:
    posterior = MeanField(WIDE_SITES, WIDE, {"w": (-1.0, -1.0)}, 0.5)
    drawn = posterior.draws(3, [0])["w"][0].detach()
    std = 0.5 * math.exp(-1)
    assert (drawn.mean() - 0.4).abs() < 5 * std / 100
    assert (drawn.std() - std).abs() < 5 * std / math.sqrt(2 * 10_000)


def test_mean_field_without_noise_is_the_network() -> None:
    draws = mean_field(noise=0.0).draws(0, range(3))
    for name, tensor in WEIGHTS.items():
        assert torch.equal(draws[name], tensor.expand(3, *tensor.shape))


def test_psi_starts_uniform_in_its_range() -> None:
    psi = MeanField(WIDE_SITES, WIDE, {"w": (-6.0, -5.0)}, 1.0).log_std["w"]
    assert -6 <= psi.min() < -5.99
    assert -5.01 < psi.max() <= -5
    assert (psi.mean() + 5.5).abs() < 5 * math.sqrt(1 / 12) / 100
    assert (psi.std() - math.sqrt(1 / 12)).abs() < 0.01
    assert (mean_field((-4.0, -4.0)).log_std["w"] == -4).all()


@given(
    mean=st.floats(-3, 3),
    log_std=st.floats(-6, 2),
    prior_mean=st.floats(-2, 2),
    prior_std=st.floats(0.05, 3),
)
def test_gaussian_kl_is_torchs(
    mean: float, log_std: float, prior_mean: float, prior_std: float
) -> None:
    found = gaussian_kl(
        torch.full((3,), mean, dtype=torch.float64),
        torch.full((3,), log_std, dtype=torch.float64),
        prior_mean,
        prior_std,
    )
    expected = 3 * kl_divergence(
        Normal(torch.tensor(mean, dtype=torch.float64), math.exp(log_std)),
        Normal(torch.tensor(prior_mean, dtype=torch.float64), prior_std),
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_mean_field_kl_is_the_mean_of_the_log_ratio() -> None:
    posterior = mean_field((-1.5, -0.5))
    count, prior = 20_000, Normal(0.0, 0.8)
    draws = posterior(
        torch.zeros(count, dtype=torch.long), fresh_normals(posterior.shapes(), seed=1, count=count)
    )
    ratios = torch.zeros(count)
    for name, mean in posterior.mean.items():
        own = Normal(mean.detach(), posterior.log_std[name].detach().exp())
        drawn = draws[name].detach()
        ratios += (own.log_prob(drawn) - prior.log_prob(drawn)).flatten(1).sum(1)
    error = ratios.std() / math.sqrt(count)
    assert (ratios.mean() - posterior.kl(0.8)).abs() < 5 * error


# Latent scales

LATENT_TENSORS = {
    "a.input_scale": torch.ones(3),
    "m.in_proj_weight_scale": torch.ones(2),
    "m.in_proj_bias_scale": torch.ones(4),
    "m.in_proj_weight": torch.randn(4, 2, generator=torch.Generator().manual_seed(0)),
    "m.in_proj_bias": torch.randn(4, generator=torch.Generator().manual_seed(1)),
}
LATENT_SITES = [
    Site("a.input_scale", (3,), "Linear"),
    Site("m.in_proj_weight_scale", (2,), "MultiheadAttention", weight="m.in_proj_weight"),
    Site("m.in_proj_bias_scale", (4,), "MultiheadAttention", weight="m.in_proj_bias"),
]


def latent(
    noise: float = 1.0,
    sites: list[Site] = LATENT_SITES,
    tensors: dict[str, Tensor] = LATENT_TENSORS,
    trained: tuple[str, ...] = ("m.in_proj_weight", "m.in_proj_bias"),
    std: tuple[float, float] = (0.05, 0.02),
    mean_std: float = 0.3,
) -> Latent:
    return Latent(sites, tensors, trained, components=3, mean_std=mean_std, std=std, noise=noise)


def test_sigma_itself_starts_where_it_should() -> None:
    gate = [Site("g", (10_000,), "Linear")]
    posterior = latent(sites=gate, tensors={"g": torch.ones(10_000)}, trained=())
    sigma, mean = softplus(posterior.rho["g"]).detach(), posterior.mean["g"].detach()
    assert sigma.shape == mean.shape == (3, 10_000)
    assert (sigma > 0).all()
    # |N(0.05, 0.02^2)| hardly differs from N(0.05, 0.02^2): 0.6 % of it is below 0.
    assert (sigma.mean() - 0.05).abs() < 3e-4
    assert (sigma.std() - 0.02).abs() < 5e-4
    assert (mean.mean() - 1).abs() < 5 * 0.3 / math.sqrt(30_000)
    assert (mean.std() - 0.3).abs() < 5 * 0.3 / math.sqrt(60_000)
    assert not torch.equal(mean[0], mean[1])


@pytest.mark.parametrize("noise", [1.0, 0.5])
def test_latent_draws_have_their_components_moments(noise: float) -> None:
    posterior = latent(noise)
    count = 20_000
    draws = posterior(
        torch.full((count,), 2), fresh_normals(posterior.shapes(), seed=0, count=count)
    )
    mean = 1 + noise * (posterior.mean["a.input_scale"][2] - 1)
    sigma = noise * softplus(posterior.rho["a.input_scale"][2])
    drawn = draws["a.input_scale"]
    assert ((drawn.mean(0) - mean).abs() < 5 * sigma / math.sqrt(count)).all()
    assert ((drawn.std(0) - sigma).abs() < 5 * sigma / math.sqrt(2 * count)).all()


def test_scales_of_weights_scale_columns_and_those_of_biases_elements() -> None:
    posterior = latent()
    noise = fresh_normals(posterior.shapes(), seed=0, count=2)
    draws = posterior(torch.tensor([0, 1]), noise)
    assert set(draws) == {"a.input_scale", "m.in_proj_weight", "m.in_proj_bias"}
    for row in (0, 1):
        z = {
            site.name: posterior.mean[site.name][row]
            + softplus(posterior.rho[site.name][row]) * noise[site.name][row]
            for site in LATENT_SITES
        }
        weight = LATENT_TENSORS["m.in_proj_weight"] @ z["m.in_proj_weight_scale"].diag()
        torch.testing.assert_close(draws["m.in_proj_weight"][row], weight)
        bias = LATENT_TENSORS["m.in_proj_bias"] * z["m.in_proj_bias_scale"]
        torch.testing.assert_close(draws["m.in_proj_bias"][row], bias)


def test_latent_without_noise_is_the_network() -> None:
    draws = latent(noise=0.0).draws(0, range(3))
    assert torch.equal(draws["a.input_scale"], torch.ones(3, 3))
    for name in ("m.in_proj_weight", "m.in_proj_bias"):
        assert torch.equal(draws[name], LATENT_TENSORS[name].expand_as(draws[name]))


def test_latent_kl_is_of_the_average_of_one_draw_of_each_component() -> None:
    """Against torch's closed form, and against the mean log-ratio of averages of draws."""
    posterior = latent(std=(0.2, 0.05))
    expected, count = torch.zeros(()), 20_000
    ratios = torch.zeros(count)
    noise = fresh_normals(posterior.shapes(), seed=0, count=3 * count)
    prior = Normal(1.0, 0.1)
    for name, mean in posterior.mean.items():
        sigma = softplus(posterior.rho[name])
        average = Normal(mean.mean(0), sigma.square().sum(0).sqrt() / 3)
        expected = expected + kl_divergence(average, prior).sum()
        component = torch.arange(3).repeat(count)
        drawn = (mean[component] + sigma[component] * noise[name]).unflatten(0, (count, 3)).mean(1)
        ratios += (average.log_prob(drawn) - prior.log_prob(drawn)).sum(1).detach()
    torch.testing.assert_close(posterior.kl(0.1), expected, rtol=1e-5, atol=1e-5)
    assert (ratios.mean() - posterior.kl(0.1)).abs() < 5 * ratios.std() / math.sqrt(count)


def test_latent_shares_its_weights_between_draws() -> None:
    posterior = latent()
    assert set(posterior.shared()) == {"m.in_proj_weight", "m.in_proj_bias"}
    assert posterior.shared()["m.in_proj_bias"] is posterior.weights["m.in_proj_bias"]
    kinds = {name.split(":")[0] for name in posterior.tensors()}
    assert kinds == {"mean", "rho", "weights"}


# Any of them


def start() -> str:
    return str([(n, v.tolist()) for p in (mean_field(), latent()) for n, v in p.tensors().items()])


def test_the_same_start_in_every_process() -> None:
    tests = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {tests!r}); import test_posterior as t; print(t.start())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == start()


@pytest.mark.parametrize("posterior", [mean_field(), latent()], ids=["mean-field", "latent"])
def test_draw_by_seed_and_index(posterior: Posterior) -> None:
    together = posterior.draws(7, [4, 0, 2])
    alone = posterior.draws(7, [2])
    assert all(torch.equal(together[name][2], alone[name][0]) for name in alone)
    assert posterior.varies()


def test_nothing_varies_in_a_fixed_posterior() -> None:
    assert Fixed().draws(0, range(3)) == {}
    assert Fixed().shared() == {}
    assert not Fixed().varies()


@pytest.mark.parametrize(
    "posterior", [members(), mean_field(), latent()], ids=lambda p: type(p).__name__
)
def test_adopted_statistics_are_stored_and_shared_but_not_trained(posterior: Posterior) -> None:
    running = torch.tensor([1.0, 2.0])
    trained = len(list(posterior.parameters()))
    posterior.adopt_statistics({"bn.running_mean": running})
    posterior.shared()["bn.running_mean"].add_(1)
    assert torch.equal(running, torch.tensor([1.0, 2.0])), "the network keeps its own"
    assert posterior.tensors()["statistics:bn.running_mean"].tolist() == [2.0, 3.0]
    assert posterior.state_dict()["statistics.bn/running_mean"].tolist() == [2.0, 3.0]
    assert len(list(posterior.parameters())) == trained
    assert "bn.running_mean" not in posterior.draws(0, [0])


# Noise of training steps


def test_training_noise_from_a_pool_is_normal_and_differs_between_draws() -> None:
    shapes = {"a": (300, 1000), "b": (7,)}
    count = 20
    assert count * 300_007 > POOL
    noise = fresh_normals(shapes, seed=5, count=count)
    assert {name: tuple(value.shape[1:]) for name, value in noise.items()} == shapes
    flat = noise["a"].flatten(1)
    error = 5 / math.sqrt(300_000)
    assert (flat.mean(1).abs() < error).all()
    assert ((flat.std(1) - 1).abs() < error).all()
    correlations = torch.corrcoef(flat) - torch.eye(count)
    assert (correlations.abs() < error).all()
    assert len({tuple(row) for row in noise["b"].tolist()}) == count
    again = fresh_normals(shapes, seed=5, count=count)
    other = fresh_normals(shapes, seed=6, count=count)
    assert torch.equal(again["a"], noise["a"])
    assert not torch.equal(other["b"], noise["b"])
