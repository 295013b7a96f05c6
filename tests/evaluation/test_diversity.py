"""Diversity of draws against loops over their pairs."""

from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor, nn

from bayesify import ABNN, DataError, SettingError, convert
from bayesify.evaluation.diversity import by_member, disagreement, mutual_kl


@st.composite
def drawn(draw: st.DrawFn) -> Tensor:
    """Probabilities `[S, B, C]`, of draws that differ, agree, or are certain."""
    shape = [draw(st.integers(2, 6)), draw(st.integers(1, 8)), draw(st.integers(2, 5))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        logits = logits[:1].expand(shape)
    return torch.softmax(draw(st.sampled_from([0, 1, 10])) * logits, -1)


@given(drawn())
def test_disagreement_is_that_of_pairs(draws: Tensor) -> None:
    labels = draws.argmax(2).numpy()
    expected = np.mean([a != b for a, b in combinations(labels, 2)], axis=0)
    assert disagreement(draws).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@given(drawn())
def test_mutual_kl_is_that_of_pairs(draws: Tensor) -> None:
    pairs = permutations(draws.numpy(), 2)
    expected = np.mean([rel_entr(a, b).sum(-1) for a, b in pairs], axis=0)
    assert mutual_kl(draws).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_dense_and_certain() -> None:
    draws = torch.softmax(torch.randn(4, 2, 3, 5, 6), 2)
    assert disagreement(draws).shape == mutual_kl(draws).shape == (2, 5, 6)
    certain = torch.eye(2).unsqueeze(1)
    assert disagreement(certain).tolist() == [1]
    assert 80 < mutual_kl(certain).item() < 110


def test_members_of_a_network() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    bnn = convert(network, ABNN(members=2, noise=0.0, draws=6))
    with torch.no_grad():
        for _, value in bnn.posterior.values.items():
            value[1] += torch.randn(value[1].shape)
    draws = bnn.predict(torch.randn(5, 3), keep_draws=True).draws
    members = by_member(draws, bnn.method.components)
    assert torch.allclose(members[0], draws[0])
    assert torch.allclose(members[1], draws[1])
    assert mutual_kl(members).min() > 0
    assert mutual_kl(draws[::2]).max() < 1e-6


def test_wrong_input_is_named() -> None:
    for measure in (disagreement, mutual_kl):
        with pytest.raises(DataError, match="at least two draws"):
            measure(torch.ones(1, 4, 2))
        with pytest.raises(DataError, match="keep_draws=True"):
            measure(torch.ones(4, 2))
        with pytest.raises(DataError, match="draws holds NaN"):
            measure(torch.full((2, 4, 2), torch.nan))
    with pytest.raises(DataError, match="5 draws are not the same number for each of 2 members"):
        by_member(torch.ones(5, 4, 2), 2)
    with pytest.raises(SettingError, match="members=0"):
        by_member(torch.ones(4, 4, 2), 0)
