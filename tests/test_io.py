import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bayesify
from bayesify import (
    ABNN,
    BayesifyError,
    Classification,
    CorruptFileError,
    SettingError,
    WrongNetworkError,
)
from conftest import small_cnn


@pytest.fixture
def bnn(cnn: nn.Module) -> bayesify.BayesianModel:
    model = bayesify.convert(cnn, ABNN(members=2, draws=4, noise=0.2), where="*")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.noise, model.temperature, model.slope = 0.123, 1.7, -0.4
    return model


def test_round_trip(
    bnn: bayesify.BayesianModel,
    cnn: nn.Module,
    images: Tensor,
    tmp_path: Path,
    untouched: Callable[..., object],
) -> None:
    with untouched(cnn):
        bnn.save(tmp_path / "bnn")
        loaded = bayesify.load(tmp_path / "bnn", cnn)
    assert loaded.method == bnn.method
    assert (loaded.noise, loaded.temperature, loaded.slope) == (0.123, 1.7, -0.4)
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)
    assert sorted(file.name for file in (tmp_path / "bnn").iterdir()) == [
        "bayesify.json",
        "posterior.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["bnn"]


def test_where_is_kept(cnn: nn.Module, images: Tensor, tmp_path: Path) -> None:
    bnn = bayesify.convert(cnn, ABNN(), where=1)
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", cnn)
    assert [site.name for site in loaded.sites] == ["4.weight"]
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)


def test_saving_again_replaces(bnn: bayesify.BayesianModel, cnn: nn.Module, tmp_path: Path) -> None:
    bnn.save(tmp_path / "bnn")
    bnn.noise = 0.9
    bnn.save(tmp_path / "bnn")
    assert bayesify.load(tmp_path / "bnn", cnn).noise == 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["bnn"]


def test_a_folder_of_the_users_is_not_replaced(bnn: bayesify.BayesianModel, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SettingError, match="not one of bayesify's"):
        bnn.save(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_resnet50_is_small(tmp_path: Path) -> None:
    from torchvision.models import resnet50

    bayesify.convert(resnet50(weights=None), ABNN(members=3)).save(tmp_path / "bnn")
    assert sum(file.stat().st_size for file in (tmp_path / "bnn").iterdir()) < 1.3e6


def test_after_moving_and_casting(cnn: nn.Module, images: Tensor, tmp_path: Path) -> None:
    bnn = bayesify.convert(cnn).to(torch.float64)
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", cnn)
    torch.testing.assert_close(
        loaded.predict(images).probs, bnn.predict(images.double()).probs.float()
    )


def test_another_network(bnn: bayesify.BayesianModel, tmp_path: Path) -> None:
    bnn.save(tmp_path / "bnn")
    with pytest.raises(
        WrongNetworkError, match=r"'8\.weight' has shape \[4, 8\] there and \[7, 8\]"
    ):
        bayesify.load(tmp_path / "bnn", small_cnn(classes=7))


def test_other_weights(bnn: bayesify.BayesianModel, cnn: nn.Module, tmp_path: Path) -> None:
    bnn.save(tmp_path / "bnn")
    other = small_cnn()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(WrongNetworkError, match="other weights"):
        bayesify.load(tmp_path / "bnn", other)


def test_saving_after_the_original_changed(
    bnn: bayesify.BayesianModel, cnn: nn.Module, tmp_path: Path
) -> None:
    with torch.no_grad():
        cnn[0].weight.add_(1)
    with pytest.raises(WrongNetworkError, match="changed in place"):
        bnn.save(tmp_path / "bnn")
    assert not list(tmp_path.iterdir())


def test_a_likelihood_of_ones_own(cnn: nn.Module, images: Tensor, tmp_path: Path) -> None:
    own = Classification(output=lambda logits: logits.flip(1))
    bnn = bayesify.convert(cnn, likelihood=own)
    bnn.save(tmp_path / "bnn")
    with pytest.raises(SettingError, match=r"likelihood=\.\.\."):
        bayesify.load(tmp_path / "bnn", cnn)
    loaded = bayesify.load(tmp_path / "bnn", cnn, likelihood=own)
    assert torch.equal(loaded.predict(images).probs, bnn.predict(images).probs)


def test_regression_keeps_its_noise(tmp_path: Path) -> None:
    network = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1))
    bnn = bayesify.convert(network, likelihood="regression")
    with torch.no_grad():
        bnn.likelihood.log_variance.fill_(-2)
    bnn.save(tmp_path / "bnn")
    loaded = bayesify.load(tmp_path / "bnn", network)
    assert loaded.likelihood.log_variance.item() == -2


# Files that are damaged or hostile


@pytest.mark.parametrize("name", ["bayesify.json", "posterior.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
def test_damaged_files(
    bnn: bayesify.BayesianModel, cnn: nn.Module, tmp_path: Path, name: str, damage: str
) -> None:
    bnn.save(tmp_path / "bnn")
    file = tmp_path / "bnn" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {"empty": b"", "truncated": content[:-20], "garbage": os.urandom(300)}[damage]
        )
    with pytest.raises(CorruptFileError, match="cannot be read|truncated|damaged"):
        bayesify.load(tmp_path / "bnn", cnn)


def edited(path: Path, **changes: object) -> None:
    file = path / "bayesify.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"format": 99}, CorruptFileError, "Update bayesify"),
        ({"method": {"name": "magic", "settings": {}}}, SettingError, "not known"),
        ({"method": {"name": "abnn", "settings": {"x": 1}}}, SettingError, "no setting 'x'"),
        ({"method": None}, CorruptFileError, "not one of bayesify's files"),
        ({"network": {}}, CorruptFileError, "which network"),
        ({"sites": ["nothing.like.this"]}, BayesifyError, "no site matches"),
        ({"noise": -1}, SettingError, "noise"),
        ({"noise": "loud"}, CorruptFileError, "not one of bayesify's files"),
        ({"temperature": float("nan")}, CorruptFileError, "temperature"),
        ({"slope": float("inf")}, CorruptFileError, "slope"),
        ({"slope": "steep"}, CorruptFileError, "not one of bayesify's files"),
        ({"likelihood": {"name": "poisson", "settings": {}}}, SettingError, "not known"),
    ],
)
def test_json_that_says_other_things(
    bnn: bayesify.BayesianModel,
    cnn: nn.Module,
    tmp_path: Path,
    changes: dict[str, object],
    error: type[BayesifyError],
    match: str,
) -> None:
    bnn.save(tmp_path / "bnn")
    edited(tmp_path / "bnn", **changes)
    with pytest.raises(error, match=match):
        bayesify.load(tmp_path / "bnn", cnn)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "lacks tensor"),
        ({"../../evil": torch.zeros(1)}, "unexpected|lacks"),
        ({"1.weight": torch.zeros(1)}, "where"),
        ({"1.weight": torch.full((2, 6), torch.nan)}, "NaN"),
        ({"1.weight": torch.zeros(2, 6, dtype=torch.int64)}, "where"),
    ],
)
def test_other_tensors(
    bnn: bayesify.BayesianModel,
    cnn: nn.Module,
    tmp_path: Path,
    tensors: dict[str, Tensor],
    match: str,
) -> None:
    from safetensors.torch import save_file

    bnn.save(tmp_path / "bnn")
    whole = {**bnn.posterior.tensors(), **tensors} if tensors else {}
    save_file(
        {name: value.contiguous() for name, value in whole.items()},
        tmp_path / "bnn" / "posterior.safetensors",
    )
    with pytest.raises(CorruptFileError, match=match):
        bayesify.load(tmp_path / "bnn", cnn)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gets_through_untyped(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes are changed, loading succeeds or raises one of our errors."""
    folder = tmp_path_factory.mktemp("fuzz") / "bnn"
    network = nn.Sequential(nn.LayerNorm(3))
    bayesify.convert(network).save(folder)
    file = folder / data.draw(st.sampled_from(["bayesify.json", "posterior.safetensors"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(BayesifyError):
        bayesify.load(folder, network)


def test_killed_while_saving_leaves_a_whole_folder(tmp_path: Path, cnn: nn.Module) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import small_cnn
import bayesify
bnn = bayesify.convert(small_cnn())
while True:
    bnn.noise += 1e-3
    bnn.save({str(tmp_path / "bnn")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "bnn").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert bayesify.load(tmp_path / "bnn", cnn).noise > 0.1


def test_a_replacement_cut_short_is_recovered(
    bnn: bayesify.BayesianModel, cnn: nn.Module, tmp_path: Path
) -> None:
    bnn.save(tmp_path / "bnn")
    (tmp_path / "bnn").rename(tmp_path / ".bnn.replaced")
    assert bayesify.load(tmp_path / "bnn", cnn).noise == 0.123


def test_a_method_that_is_not_listed(cnn: nn.Module, tmp_path: Path) -> None:
    class Own(ABNN):
        pass

    bnn = bayesify.convert(cnn, Own())
    with pytest.raises(SettingError, match="Own is not listed"):
        bnn.save(tmp_path / "bnn")
    assert not (tmp_path / "bnn").exists()
