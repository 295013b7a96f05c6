import copy
import math
from collections import UserDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, IBNN, DataError, NonFiniteError, SettingError


def test_forward_is_differentiable(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(draws=6))
    images.requires_grad_()
    log_probs = bnn(images)
    torch.testing.assert_close(log_probs.exp(), bnn.predict(images.detach(), draws=6).probs)
    log_probs[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in bnn.posterior.parameters())
    assert all(parameter.grad is None for parameter in cnn.parameters())


def test_nothing_done_to_the_bnn_reaches_the_original(
    cnn: nn.Module, images: Tensor, untouched: Callable[..., object]
) -> None:
    cnn.train()
    with untouched(cnn):
        bnn = bayesify.convert(cnn)
        bnn.double().predict(images.double())
        bnn.to(torch.bfloat16)
        bnn.float().train()
        bnn.requires_grad_(False)
        bnn.zero_grad()
        bnn.sample()[0].weight.data.zero_()
        bnn.predict(images)
        assert not any(module.training for module in bnn.network.modules())


def test_state_holds_the_posterior_only(cnn: nn.Module) -> None:
    bnn = bayesify.convert(cnn, ABNN(members=2, draws=4), where="*")
    assert set(bnn.state_dict()) == {
        f"posterior.values.{name}" for name in ("1/weight", "1/bias", "4/weight", "4/bias")
    }
    assert "2 random tensors" in repr(bnn)


def test_draws_follow_what_they_are_drawn_from(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.3))
    bnn.strategy = "looped"
    first = bnn.predict(images).probs
    assert not torch.equal(bnn.predict(images, seed=1).probs, first)
    bnn.noise = 0.1
    assert not torch.equal(bnn.predict(images).probs, first)
    bnn.noise = 0.3
    assert torch.equal(bnn.predict(images).probs, first)
    next(bnn.parameters()).data.mul_(1.5)  # which torch's version counter does not notice
    assert not torch.equal(bnn.predict(images).probs, first)


def test_without_noise_a_component_runs_once(
    cnn: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = bayesify.convert(cnn, ABNN(members=3, draws=12))
    bnn.strategy = "looped"
    calls = []
    plain = type(bnn.runner).plain
    monkeypatch.setattr(
        type(bnn.runner), "plain", lambda *args: calls.append(len(args[2])) or plain(*args)
    )
    counts = []
    for bnn.noise in (0.1, 0.0):
        calls.clear()
        bnn.predict(images)
        counts.append(calls.count(len(images)))
    assert counts == [12, 3]
    every = bnn.predict(images, keep_draws=True)
    assert len(every.draws) == 12
    torch.testing.assert_close(every.probs, bnn.predict(images).probs)


def test_deepcopy_is_independent(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn)
    bnn.temperature, bnn.slope, bnn.noise = 2.0, -0.3, 0.2
    other = copy.deepcopy(bnn)
    assert torch.equal(other.predict(images).probs, bnn.predict(images).probs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(other.predict(images).probs, bnn.predict(images).probs)


def test_sample_is_an_ordinary_network(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn, ABNN(noise=0.2, draws=3))
    kept = bnn.predict(images, keep_draws=True, seed=5).draws
    for index in range(3):
        network = bnn.sample(seed=5, index=index)
        assert type(network) is type(cnn)
        assert all(parameter.requires_grad for parameter in network.parameters())
        torch.testing.assert_close(network(images).softmax(1), kept[index])
    bnn.noise = 0.0
    assert torch.equal(bnn.sample(0)(images), cnn(images))


@pytest.mark.parametrize("method", [ABNN(noise=0.2), IBNN(mean_std=0.3)], ids=["ABNN", "IBNN"])
def test_a_samples_state_holds_its_whole_draw(
    method: bayesify.Method, cnn: nn.Module, images: Tensor
) -> None:
    bnn = bayesify.convert(cnn, method)
    one, other = bnn.sample(seed=1), bnn.sample(seed=2)
    assert not torch.equal(one(images), other(images))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(images), other(images))


def test_predict_takes_what_users_have(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn)
    bnn.strategy = "looped"
    expected = bnn.predict(images, batch_size=4).probs
    labelled = TensorDataset(images, torch.zeros(12))
    for x in (
        DataLoader(labelled, 4),
        DataLoader(TensorDataset(images), 4),
        (batch for batch in images.split(4)),
        iter([{"input": part, "labels": None} for part in images.split(4)]),
        [(part, None) for part in images.split(4)],
    ):
        assert torch.equal(bnn.predict(x, batch_size=4).probs, expected)
    assert torch.equal(bnn.predict((images,), batch_size=4).probs, expected)
    assert torch.equal(bnn.predict([images], batch_size=4).probs, expected)
    for mapping in (dict, UserDict):  # transformers hand over a UserDict
        keywords = mapping({"input": images, "labels": None})
        assert torch.equal(bnn.predict(keywords, batch_size=4).probs, expected)


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return self.norm(a + 2 * b) * scale

    bnn = bayesify.convert(Two())
    a, b, y = torch.randn(6, 4), torch.randn(6, 4), torch.zeros(6)
    expected = bnn.predict((a, b)).probs
    assert torch.equal(bnn.predict({"a": a, "b": b, "scale": 1.0}).probs, expected)
    assert torch.equal(bnn.predict(DataLoader(TensorDataset(a, b, y), 6)).probs, expected)


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.zeros(0, 1, 8, 8), "batch is empty"),
        (torch.full((2, 1, 8, 8), math.nan), "2 of 2 examples, the first at position 0"),
        (torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), math.inf)]), "position 1"),
        (torch.zeros(2, 2, 8, 8), "cannot run on inputs"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.int64), "cannot run on inputs"),
        ("images/", "not understood"),
        (3, "not understood"),
        ({"wrong": torch.zeros(2, 1, 8, 8)}, "cannot run on inputs"),
        (iter([]), "loader is empty"),
    ],
)
def test_bad_inputs(
    cnn: nn.Module, x: object, match: str, untouched: Callable[..., object]
) -> None:
    bnn = bayesify.convert(cnn)
    with untouched(cnn), pytest.raises(DataError, match=match):
        bnn.predict(x)


def test_nan_from_the_network() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) / x.abs().sum(1, keepdim=True) * 0 / x.sum()

    with pytest.raises(NonFiniteError, match="NaN for 2 of 2"):
        bayesify.convert(Divides()).predict(torch.zeros(2, 4))


@pytest.mark.parametrize("draws", [0, -3, 4, 2.0, True])
def test_bad_draws(cnn: nn.Module, images: Tensor, draws: object) -> None:
    with pytest.raises(SettingError, match="draws="):
        bayesify.convert(cnn).predict(images, draws=draws)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"members": 0}, "members=0"),
        ({"members": 2.5}, "members=2.5"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"noise": math.inf}, "noise=inf"),
        ({"lr": math.nan}, "lr=nan"),
        ({"members": 3, "draws": 10}, "Use draws=9"),
    ],
)
def test_bad_method_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        ABNN(**settings)


def test_other_bad_settings(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn)
    with pytest.raises(SettingError, match="looped, vectorised"):
        bnn.strategy = "fast"
    with pytest.raises(SettingError, match="noise=-1"):
        bnn.noise = -1
    with pytest.raises(SettingError, match="batch_size=0"):
        bnn.predict(images, batch_size=0)
    with pytest.raises(SettingError, match="score='magic'"):
        bnn.evaluate([(images, torch.zeros(12))], score="magic")


def test_evaluate(cnn: nn.Module, images: Tensor) -> None:
    bnn = bayesify.convert(cnn)
    y = torch.randint(0, 4, (12,))
    data = DataLoader(TensorDataset(images, y), 5)
    ood = {"noise": DataLoader(TensorDataset(3 * torch.randn(20, 1, 8, 8)), 5)}
    report = bnn.evaluate(data, ood=ood)
    p = bnn.predict(images)
    assert report.examples == 12
    assert report.accuracy == pytest.approx((p.label == y).float().mean().item())
    assert report.nll == pytest.approx(-p.probs.gather(1, y[:, None]).log().mean().item(), abs=1e-5)
    truth = nn.functional.one_hot(y, 4)
    assert report.brier == pytest.approx((p.probs - truth).square().sum(1).mean().item(), abs=1e-5)
    assert 0 <= report.ood["noise"].auroc <= 1
    assert report.to_dict()["ood"]["noise"]["fpr95"] == report.ood["noise"].fpr95
    assert "AUROC" in str(report)
    for score in ("aleatoric", "epistemic", "confidence"):
        assert bnn.evaluate(data, ood=ood, score=score).nll == pytest.approx(report.nll)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        ("binary", 1, torch.randint(0, 2, (20,))),
        ("multilabel", 3, torch.randint(0, 2, (20, 3))),
        ("regression", 1, torch.randn(20)),
        ("regression", 2, torch.randn(20, 2)),
        (bayesify.Regression(heteroscedastic=True), 4, torch.randn(20, 2)),
    ],
    ids=["binary", "multilabel", "regression", "regression-2", "heteroscedastic"],
)
@pytest.mark.filterwarnings("ignore:training did not help")
def test_every_likelihood_end_to_end(
    likelihood: object, outputs: int, target: Tensor, untouched: Callable[..., object]
) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, outputs))
    x = torch.randn(20, 4)
    data = DataLoader(TensorDataset(x, target), batch_size=5)
    with untouched(network):
        bnn = bayesify.convert(network, ABNN(members=2, draws=4), likelihood=likelihood)
        result = bnn.fit(data, validation=data, epochs=2, progress=False)
        assert result.nll <= result.network_nll
        bnn.calibrate(data)
        report = bnn.evaluate(data, ood={"far": DataLoader(TensorDataset(10 + x), 5)})
        assert math.isfinite(report.nll)
        assert 0 <= report.ood["far"].auroc <= 1
        p = bnn.predict(x)
        assert (p.epistemic >= 0).all()
        assert (p.uncertainty >= p.epistemic).all()
        assert bnn(x).requires_grad
