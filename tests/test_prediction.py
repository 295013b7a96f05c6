import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesify
from bayesify import Classification, DataError, Multilabel, Prediction, Regression, SettingError


def classes(outputs: torch.Tensor, keep: bool = False) -> Prediction:
    statistics = Classification().statistics(outputs)
    averages = {name: value.mean(0) for name, value in statistics.items()}
    return Prediction("classes", averages, statistics["probs"] if keep else None)


@given(
    draws=st.integers(1, 6),
    batch=st.integers(1, 4),
    count=st.integers(2, 7),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 100),
)
def test_uncertainties_add_up(draws: int, batch: int, count: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = classes(scale * torch.randn(draws, batch, count, generator=generator))
    torch.testing.assert_close(p.probs.sum(1), torch.ones(batch))
    torch.testing.assert_close(p.entropy, p.aleatoric + p.epistemic)
    assert (p.epistemic >= 0).all()
    assert (p.aleatoric >= 0).all()
    assert (p.entropy <= math.log(count) + 1e-5).all()
    assert torch.equal(p.label, p.probs.argmax(1))
    assert torch.equal(p.confidence, p.probs.max(1).values)


def test_known_uncertainties() -> None:
    sure = torch.tensor([[[50.0, -50.0]], [[-50.0, 50.0]]])  # two draws, sure of opposite classes
    p = classes(sure)
    assert p.entropy.item() == pytest.approx(math.log(2))
    assert p.aleatoric.item() == pytest.approx(0, abs=1e-6)
    assert p.epistemic.item() == pytest.approx(math.log(2))
    unsure = classes(torch.zeros(2, 1, 2))  # both say fifty-fifty
    assert unsure.aleatoric.item() == pytest.approx(math.log(2))
    assert unsure.epistemic.item() == pytest.approx(0, abs=1e-6)


def test_a_class_that_is_impossible_has_no_share() -> None:
    p = classes(torch.tensor([[[0.0, -math.inf, 0.0]]]))
    assert p.entropy.item() == pytest.approx(math.log(2))
    assert p.epistemic.item() == pytest.approx(0, abs=1e-6)


def test_regression_is_the_law_of_total_variance() -> None:
    torch.manual_seed(0)
    mean, log_variance = 1000 + torch.randn(50, 3, 2), torch.randn(50, 3, 2)
    statistics = Regression().statistics(torch.stack([mean, log_variance], 2))
    p = Prediction("values", {name: value.mean(0) for name, value in statistics.items()})
    torch.testing.assert_close(p.mean.float(), mean.mean(0))
    expected = mean.double().var(0, unbiased=False)
    torch.testing.assert_close(p.epistemic, expected)
    torch.testing.assert_close(p.aleatoric, log_variance.double().exp().mean(0))
    torch.testing.assert_close(p.std**2, p.aleatoric + p.epistemic)
    with pytest.raises(AttributeError, match="mean and std instead"):
        _ = p.probs


def test_multilabel() -> None:
    outputs = torch.tensor([[[3.0, -3.0]], [[3.0, 3.0]]])
    statistics = Multilabel().statistics(outputs)
    p = Prediction("labels", {name: value.mean(0) for name, value in statistics.items()})
    assert p.label.tolist() == [[True, False]]
    assert p.epistemic[0, 0].item() == pytest.approx(0, abs=1e-6)
    assert p.epistemic[0, 1].item() > 0.4
    assert list(p.to_pandas().columns) == ["prob_0", "prob_1", "entropy", "aleatoric", "epistemic"]


def test_slicing_and_joining() -> None:
    p = classes(torch.randn(3, 5, 4), keep=True)
    assert len(p) == 5
    assert len(p[1:3]) == 2
    assert len(p[-1]) == 1
    assert torch.equal(p[[0, 2]].probs, p.probs[[0, 2]])
    assert torch.equal(p[p.confidence > 0.5].probs, p.probs[p.confidence > 0.5])
    assert p[1:3].draws.shape == (3, 2, 4)
    joined = Prediction.cat([p[:2], p[2:]])
    assert torch.equal(joined.probs, p.probs)
    assert torch.equal(joined.draws, p.draws)
    assert Prediction.cat([p[:2], classes(torch.randn(3, 5, 4))]).draws is None
    with pytest.raises(IndexError, match="example 5"):
        p[5]
    with pytest.raises(DataError, match="nothing to join"):
        Prediction.cat([])
    with pytest.raises(DataError, match="different kinds"):
        Prediction.cat([p, Prediction("values", {"mean": torch.ones(1)})])


def test_draws_used_go_with_their_examples() -> None:
    p = classes(torch.randn(3, 5, 4))
    assert p.used is None
    p.used = torch.tensor([6, 24, 12, 6, 24])
    assert p[1:3].used.tolist() == [24, 12]
    assert p[-1].used.tolist() == [24]
    assert p[p.used == 6].used.tolist() == [6, 6]
    assert Prediction.cat([p[2:], p[:2]]).used.tolist() == [12, 6, 24, 6, 24]
    assert Prediction.cat([p, classes(torch.randn(3, 5, 4))]).used is None
    assert p.to("cpu").used.tolist() == p.used.tolist()
    assert p.to_pandas()["used"].tolist() == p.used.tolist()
    assert "used" in repr(p)
    labels = Prediction("labels", {"probs": p.probs, "aleatoric": 0 * p.probs}, used=p.used)
    assert labels.to_pandas()["used"].tolist() == p.used.tolist()


def test_to_pandas() -> None:
    p = classes(torch.randn(3, 5, 2))
    table = p.to_pandas()
    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == [
        "label", "confidence", "entropy", "aleatoric", "epistemic", "prob_0", "prob_1",
    ]  # fmt: skip
    assert table["prob_1"].to_numpy() == pytest.approx(p.probs[:, 1].numpy())
    with pytest.raises(SettingError, match="one row an example"):
        classes(torch.randn(3, 5, 2, 4, 4)).to_pandas()


def test_to_pandas_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(bayesify.MissingExtraError, match=r"bayesify\[pandas\]"):
        classes(torch.randn(3, 5, 2)).to_pandas()


def test_repr_is_useful() -> None:
    p = classes(torch.randn(3, 9, 4), keep=True)
    assert "9 examples, 3 draws kept" in repr(p)
    assert "epistemic" in repr(p)
    assert "prob_0" not in repr(p)
    assert "1 example" in repr(p[0])
    assert "[2, 4, 4]" in repr(classes(torch.randn(3, 2, 5, 4, 4)))
