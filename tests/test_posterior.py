import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesify.posterior import Members, fresh_normals, key, normals
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
