import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

import bayesify
from bayesify import MeanFieldVI, SettingError
from bayesify.batches import as_inputs
from bayesify.methods import make_method
from bayesify.posterior import fresh_normals, key
from conftest import small_cnn

pytestmark = pytest.mark.filterwarnings("ignore:training did not help")

STATISTICS = ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var")


def test_the_first_step_is_the_papers_gradient(gradients: list[dict[int, Tensor]]) -> None:
    """Mean negative log-likelihood at one draw for the batch, plus KL / n."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
    bnn = bayesify.convert(network, MeanFieldVI(prior_std=0.5, log_std=(-2.0, -1.0)))
    posterior = bnn.posterior
    noise = fresh_normals(posterior.shapes(), seed=key("round", key("step", 0, 0), 0), count=1)
    draw = {name: value[0] for name, value in posterior(torch.zeros(1).long(), noise).items()}
    loss = nn.functional.cross_entropy(functional_call(network, draw, (x,)), y)
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    expected = torch.autograd.grad(loss + posterior.kl(0.5) / 700, parameters)
    result = bnn.fit([(x, y)], validation=[(x, y)], num_examples=700, progress=False)
    assert (result.steps, result.groups) == (1, 1)
    for name, parameter, wanted in zip(names, parameters, expected, strict=True):
        found = gradients[0][id(parameter)]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4, msg=name)


def test_from_scratch(
    loader: DataLoader, validation: DataLoader, test_set: DataLoader, tmp_path: Path
) -> None:
    network = small_cnn()
    own = {name: value.clone() for name, value in network.state_dict().items()}
    bnn = bayesify.convert(network, MeanFieldVI(lr=0.03))
    result = bnn.fit(loader, epochs=8, validation=validation, progress=False)
    assert result.groups == 1
    assert "(one draw a batch)" in str(result)
    assert bnn.evaluate(test_set).accuracy > 0.6  # by chance 0.25
    for name in STATISTICS:
        adapted = bnn.posterior.statistics[name]
        assert not torch.equal(adapted, own[name]), name
        assert torch.equal(bnn.sample().state_dict()[name], adapted)
    assert all(torch.equal(value, own[name]) for name, value in network.state_dict().items())

    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", network)
    x = next(iter(test_set))[0]
    assert torch.equal(loaded.predict(x).probs, bnn.predict(x).probs)
    for name in STATISTICS:
        assert torch.equal(loaded.posterior.statistics[name], bnn.posterior.statistics[name])


def test_statistics_are_the_batches(stripes: tuple[Tensor, Tensor]) -> None:
    """After one step with no randomness, they are torch's own."""
    x, y = stripes[0][:50], stripes[1][:50]
    network = small_cnn()
    bnn = bayesify.convert(network, MeanFieldVI(noise=0.0, lr=0.0))
    bnn.fit([(x, y)], validation=[(x, y)], keep="last", progress=False)
    other = small_cnn().train()
    with torch.no_grad():
        other(x)
    for name in STATISTICS:
        torch.testing.assert_close(bnn.posterior.statistics[name], other.state_dict()[name])


def test_validation_runs_with_the_adapted_statistics(stripes: tuple[Tensor, Tensor]) -> None:
    """Statistics so wrong that nothing else could mend them: held-out NLL sees them adapt."""
    x, y = stripes[0][:200], stripes[1][:200]
    network = small_cnn()
    with torch.no_grad():
        network[1].running_mean.fill_(50)
        network[4].running_mean.fill_(-50)
    bnn = bayesify.convert(network, MeanFieldVI(lr=0.0, log_std=(-9.0, -9.0)))
    batches = list(zip(x.split(50), y.split(50), strict=True))
    result = bnn.fit(batches, validation=batches, epochs=10, temper=False, progress=False)
    nlls = [nll for _, _, nll in result.history]
    assert result.untrained_nll > nlls[0] > nlls[1] > nlls[2] > nlls[3]
    assert result.untrained_nll > 3 * nlls[3]
    assert result.kept == "step 40"
    held = [(as_inputs(x), y)]
    assert bnn.judge(held, draws=8, seed=0)[0] == pytest.approx(nlls[3], rel=1e-3)


def test_a_copy_has_the_adapted_statistics_and_can_be_moved(
    loader: DataLoader, validation: DataLoader
) -> None:
    import copy

    bnn = bayesify.convert(small_cnn(), MeanFieldVI(lr=0.03, draws=4))
    bnn.fit(loader, validation=validation, epochs=2, progress=False)
    x = next(iter(validation))[0]
    assert torch.equal(copy.deepcopy(bnn).predict(x).probs, bnn.predict(x).probs)
    double = copy.deepcopy(bnn).double()
    assert double.posterior.statistics["1.running_mean"].dtype == torch.float64
    torch.testing.assert_close(double.predict(x.double()).probs, bnn.predict(x).probs)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prior_std": 0}, "prior_std=0"),
        ({"prior_std": math.nan}, "prior_std=nan"),
        ({"lr": -1}, "lr=-1"),
        ({"log_std": (0, -1)}, "the smaller first"),
        ({"log_std": (0, 50)}, "overflows"),
        ({"draws": 0}, "draws=0"),
    ],
)
def test_bad_settings(settings: dict[str, object], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        MeanFieldVI(**settings)


def test_settings_come_back_from_json() -> None:
    method = MeanFieldVI(log_std=(-4, -3), prior_std=0.5)
    assert make_method("mean-field-vi", json.loads(json.dumps(method.to_dict()))) == method
