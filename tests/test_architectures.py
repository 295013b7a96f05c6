"""The battery, methods x networks: convert, run vectorised as looped, come back from disk."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bayesify
from architectures import ARCHITECTURES, Architecture
from bayesify import ABNN, IBNN, BayesAdapter, BayesifyWarning, Method
from bayesify.batches import as_inputs

METHODS = [
    ABNN(members=2, draws=4, noise=0.2),
    BayesAdapter(draws=2, log_std=(-5.0, -4.0)),
    IBNN(components=2, draws=2, mean_std=0.2),
]


def test_there_are_more_than_thirty() -> None:
    assert len(ARCHITECTURES) >= 30


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_architecture(
    architecture: Architecture, method: Method, tmp_path: Path, untouched: Callable[..., object]
) -> None:
    torch.manual_seed(0)
    network = architecture.build().eval()
    with torch.no_grad():  # some heads start at zero, and then nothing random shows
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(0, 0.1)
    x = architecture.example()
    with untouched(network):
        # Everything random, early layers too: in an untrained network late ones may not show.
        bnn = bayesify.convert(network, method, likelihood=architecture.likelihood, where=1.0)
        bnn.strategy = "looped"
        looped = bnn.predict(x, keep_draws=True)
        bnn.strategy = "vectorised"
        if not isinstance(method, architecture.looped):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", category=BayesifyWarning)
                # torch's own advice on kernels that are slow under vmap
                warnings.filterwarnings("ignore", message=".*performance drop.*")
                vectorised = bnn.predict(x, keep_draws=True)
        else:
            with pytest.warns(BayesifyWarning, match="cannot be vectorised"):
                vectorised = bnn.predict(x, keep_draws=True)
        close = {"atol": 1e-5, "rtol": 1e-4}  # some are 50 layers deep
        torch.testing.assert_close(vectorised.draws, looped.draws, **close)
        for bnn.strategy in ("folded", "stacked"):
            taped = bnn.predict(x, keep_draws=True)
            torch.testing.assert_close(taped.draws, looped.draws, **close)
        assert (looped.draws.std(0) > 0).any(), "draws must differ"

        bnn.strategy = "looped"
        bnn.save(tmp_path / "bnn")
        likelihood = architecture.likelihood
        loaded = bayesify.load(
            tmp_path / "bnn",
            network,
            likelihood=None if isinstance(likelihood, str) else likelihood,
        )
        loaded.strategy = "looped"
        assert torch.equal(loaded.predict(x).probs, looped.probs)

        bnn.noise = 0.0
        direct = bnn.likelihood.read(_call(network, x))
        with torch.no_grad():
            assert torch.equal(next(bnn.outputs(as_inputs(x), draws=2))[0], direct)
        assert torch.equal(bnn.likelihood.read(_call(bnn.sample(0), x)), direct)


def _call(network: torch.nn.Module, x: object) -> object:
    with torch.no_grad():
        return network(**x) if isinstance(x, dict) else network(x)
