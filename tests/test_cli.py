"""The command line, as users call it: what it prints, writes and ends with."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import bayesify
from bayesify.cli import app
from bayesify.cli.interrupts import heeded_interrupts
from bayesify.errors import BayesifyError
from bayesify.model import BayesianModel
from bayesify.zoo import load_model
from conftest import heed_interrupts

NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.LayerNorm(16),
                         nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 3))

def regression():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def start(*arguments: object) -> "subprocess.Popen[str]":
    """A command in a process of its own, which can be interrupted."""
    code = "from bayesify.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,  # noqa: PLW1509
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network's code and data, as a user may have them."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    parts = {"train": slice(0, 60), "validation": slice(60, 90), "test": slice(90, 120)}
    arrays = {f"x_{name}": x[rows] for name, rows in parts.items()}
    arrays |= {f"y_{name}": y[rows] for name, rows in parts.items()}
    folder = tmp_path / "home"
    folder.mkdir()
    np.savez(folder / "data.npz", **arrays)
    np.savez(folder / "values.npz", x=x, y=x[:, 0])
    np.savez(folder / "other.npz", x=5 + 5 * x)
    (folder / "net.py").write_text(NETWORK)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def fitted(home: Path) -> Path:
    result = call(
        *("fit", "net.py:build", "data.npz:train", "--validation", "data.npz:validation"),
        *("--calibration", "data.npz:validation[:20]", "--set", "members=2", "--set", "draws=4"),
        *("--epochs", 2, "--batch-size", 20, "--no-progress", "--output", "bnn"),
    )
    assert result.exit_code == 0, result.output
    assert "calibrated: noise" in result.output
    assert "saved to bnn" in result.output
    return home / "bnn"


@pytest.mark.parametrize("flag", ["--temper", "--no-temper"])
def test_a_fit_ends_with_a_temperature_unless_told(home: Path, flag: str) -> None:
    result = call(
        *("fit", "net.py:build", "data.npz:train", "--validation", "data.npz:validation"),
        *("--no-progress", "--output", "bnn", flag),
    )
    assert result.exit_code == 0, result.output
    settings = json.loads((home / "bnn" / "bayesify.json").read_text())
    assert (settings["temperature"] == 1.0) == (flag == "--no-temper")


def test_a_network_without_normalisation_layers(home: Path) -> None:
    (home / "plain.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    common = ("fit", "plain.py:build", "data.npz:train", "--validation", "data.npz:validation")
    result = call(*common, "--no-progress", "--output", "bnn")
    assert result.exit_code == 1
    assert "BayesAdapter" in result.stderr, "the error names methods that go"
    result = call(*common, "--method", "bayes-adapter", "--no-progress", "--output", "bnn")
    assert result.exit_code == 0, result.output
    result = call("evaluate", "bnn", "plain.py:build", "data.npz:test")
    assert result.exit_code == 0, result.output
    assert "network" in result.output


def test_version_and_help_end_with_0() -> None:
    result = call("--version")
    assert (result.exit_code, result.output) == (0, f"bayesify {bayesify.__version__}\n")
    result = call("--help")
    assert result.exit_code == 0
    for command in ("demo", "plan", "fit", "evaluate", "predict"):
        assert command in result.output
        help_text = call(command, "--help")
        assert help_text.exit_code == 0
        assert "--" in help_text.output
    assert "A worked example" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("plan",),
        ("plan", "digits", "--set", "members"),
        ("plan", "digits", "--where", "bn1*", "--last", "1"),
        ("fit", "digits", "digits:train"),
        ("fit", "digits", "digits:train", "--output", "x", "--epochs", "0"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], home: Path) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "nope"), "no model is called 'nope'"),
        (("plan", "digits", "--method", "magic"), "method 'magic' is not known"),
        (("plan", "digits", "--set", "luck=1"), "abnn has no setting 'luck'"),
        (("plan", "digits", "--set", "members=2.5"), "--set members=2.5: a whole number"),
        (("plan", "digits", "--set", "noise=much"), "--set noise=much: a number is wanted"),
        (("plan", "digits", "--set", "members=5"), "draws=24 is not a multiple"),
        (("plan", "digits", "--where", "layer9.*"), "layer9.*"),
        (("plan", "digits", "--where", "auto"), "a plan has none"),
        (("plan", "digits", "--where", "auto", "--where", "bn1*"), "no site matches 'auto'"),
        (("plan", "digits", "--weights", "absent.safetensors"), "there is no such file"),
        (("fit", "digits", "absent.npz", "--output", "x"), "absent.npz"),
        (("fit", "digits", "digits:train", "--output", "net.py"), "net.py exists"),
        (
            ("fit", "digits", "digits:train", "--output", "x", "--normalise", "0.5"),
            "--normalise '0.5': write cifar10",
        ),
        (("fit", "digits", "digits:train", "--output", "x", "--augment", "mirror"), "mirror"),
        (("fit", "digits", "digits:train", "--output", "x", "--likelihood", "poetry"), "poetry"),
        (("evaluate", "absent", "digits", "digits:test"), "absent is not a folder"),
        (("predict", "absent", "digits", "digits:test"), "absent is not a folder"),
    ],
)
def test_errors_end_with_1_and_one_line(arguments: tuple[str, ...], said: str, home: Path) -> None:
    before = files(home)
    result = call(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert files(home) - {"__pycache__"} == before


def test_debug_shows_where_an_error_comes_from() -> None:
    result = call("--debug", "plan", "nope")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "error: no model is called 'nope'" in result.stderr


def test_operating_system_errors_are_one_line_too(fitted: Path) -> None:
    (fitted.parent / "file").write_text("")
    result = call("predict", fitted, "net.py:build", "data.npz:test", "--output", "file/p.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_plan_shows_sites_totals_and_what_is_skipped(home: Path) -> None:
    settings = ("--set", "members=2", "--set", "draws=4", "--where", "*")
    result = call("plan", "net.py:build", *settings)
    assert result.exit_code == 0
    assert "members=2" in result.output
    for text in ("1.weight", "LayerNorm", "32 a draw", "128 parameters", "skipped 4 (LayerNorm)"):
        assert text in result.output


def test_plan_chooses_sites(home: Path) -> None:
    by_name = call("plan", "net.py:build", "--where", "3.*")
    assert "1 of 2" in by_name.output
    assert "3.weight" in by_name.output
    last = call("plan", "net.py:build", "--last", 1, "--example", "data.npz:train")
    assert last.output == by_name.output


def test_fit_saves_what_python_can_load(fitted: Path) -> None:
    assert files(fitted) == {"bayesify.json", "posterior.safetensors"}
    assert not list(fitted.parent.glob("*checkpoint*"))
    bnn = bayesify.load(fitted, load_model(f"{fitted.parent / 'net.py'}:build"))
    assert bnn.method == bayesify.ABNN(members=2, draws=4)
    assert torch.isfinite(bnn.predict(torch.randn(5, 4)).probs).all()


def test_fit_says_that_it_did_not_calibrate_and_shows_warnings_as_lines(home: Path) -> None:
    result = call("fit", "net.py:build", "data.npz:train", "--output", "bnn", "--no-progress")
    assert result.exit_code == 0
    assert "not calibrated" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "no validation loader" in line]
    assert line.startswith("warning: ")


def test_fit_with_last_weights_and_normalisation(home: Path) -> None:
    save_file(load_model("digits").state_dict(), home / "own.safetensors")
    result = call(
        *("fit", "digits", "digits:train[:64]", "--weights", "own.safetensors", "--last", 1),
        *("--validation", "digits:validation[:32]", "--normalise", "0.1;0.9", "--output", "bnn"),
        "--no-progress",
    )
    assert result.exit_code == 0, result.output
    assert "--normalise '0.1;0.9'" in result.output
    saved = json.loads((home / "bnn" / "bayesify.json").read_text())
    assert saved["sites"] == ["bn3.weight"]


def test_fit_chooses_sites_by_held_out_data(home: Path) -> None:
    settings = ("--set", "members=2", "--set", "draws=4", "--where", "auto", "--no-progress")
    by_validation = call(
        *("fit", "net.py:build", "data.npz:train", "--validation", "data.npz:validation"),
        *settings, "--output", "bnn",
    )  # fmt: skip
    assert by_validation.exit_code == 0, by_validation.output
    assert "judged by 15 examples" in by_validation.stdout
    saved = json.loads((home / "bnn" / "bayesify.json").read_text())
    bnn = bayesify.load(home / "bnn", load_model("net.py:build"))
    assert tuple(saved["sites"]) == bnn.choice.sites
    assert str(bnn.choice) in by_validation.stdout
    by_training = call("fit", "net.py:build", "data.npz:train", *settings, "--output", "other")
    assert by_training.exit_code == 0, by_training.output
    assert "judged by 3 examples" in by_training.stdout


def test_an_interrupted_command_goes_on_when_run_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("fit", "net.py:build", "data.npz:train", "--validation", "data.npz:validation")
    command += ("--no-progress", "--output", "bnn")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BayesianModel, "save", interrupt)
        result = call(*command)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")
    assert (home / "bnn.checkpoint.safetensors").exists()
    result = call(*command)
    assert result.exit_code == 0
    assert "continuing from bnn.checkpoint.safetensors" in result.stderr
    assert files(home) - {"__pycache__"} == {"bnn", "data.npz", "net.py", "other.npz", "values.npz"}


def test_ctrl_c_during_fit_ends_with_130_and_leaves_only_whole_files(home: Path) -> None:
    output = home / "out" / "bnn"
    process = start(
        *("fit", "net.py:build", "data.npz:train", "--validation", "data.npz:validation"),
        *("--epochs", 100_000, "--no-progress", "--output", output),
    )
    checkpoint = output.with_name("bnn.checkpoint.safetensors")
    try:
        deadline = time.monotonic() + 60
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert checkpoint.exists()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr
    assert files(output.parent) == {checkpoint.name}
    bayesify.files.read_tensors(checkpoint)


def test_evaluate_sets_the_network_beside_it(fitted: Path) -> None:
    result = call(
        *("evaluate", fitted, "net.py:build", "data.npz:test", "--json", "report.json"),
        *("--ood", "far=other.npz", "--ood", "other.npz", "--draws", 6),
    )
    assert result.exit_code == 0, result.output
    for text in ("network", "ABNN", "accuracy", "NLL", "ECE", "Brier", "far: AUROC", "FPR95"):
        assert text in result.output
    numbers = json.loads((fitted.parent / "report.json").read_text())
    assert set(numbers) == {"network", "ABNN"}
    assert set(numbers["ABNN"]["ood"]) == {"far", "other.npz"}
    assert numbers["ABNN"]["examples"] == 30
    assert f"{numbers['network']['nll']:.4f}" in result.output


def test_the_network_beside_it_is_the_network(fitted: Path) -> None:
    call("evaluate", fitted, "net.py:build", "data.npz:test", "--json", "report.json")
    numbers = json.loads((fitted.parent / "report.json").read_text())["network"]
    with np.load("data.npz") as arrays:
        x, y = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
    with torch.no_grad():
        logits = load_model("net.py:build")(x)
    assert numbers["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item())
    assert numbers["accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())


def test_another_network_is_refused(fitted: Path) -> None:
    result = call("evaluate", fitted, "net.py:regression", "data.npz:test")
    assert result.exit_code == 1
    assert "belongs to another network" in result.stderr


def test_predict_writes_csv_to_a_file_or_standard_output(fitted: Path) -> None:
    shown = call("predict", fitted, "net.py:build", "data.npz:test")
    assert shown.exit_code == 0
    written = call("predict", fitted, "net.py:build", "data.npz:test", "--output", "p.csv")
    assert written.output == "wrote p.csv\n"
    text = (fitted.parent / "p.csv").read_text()
    assert text == shown.stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 30
    assert list(rows[0])[:5] == ["label", "confidence", "entropy", "aleatoric", "epistemic"]
    for row in rows:
        probs = [float(row[f"prob_{c}"]) for c in range(3)]
        assert sum(probs) == pytest.approx(1, abs=1e-4)
        assert int(row["label"]) == int(np.argmax(probs))
        parts = float(row["aleatoric"]) + float(row["epistemic"])
        assert float(row["entropy"]) == pytest.approx(parts, abs=1e-5)


def test_unlabelled_data_is_predicted_but_not_evaluated(fitted: Path) -> None:
    assert call("predict", fitted, "net.py:build", "other.npz").exit_code == 0
    result = call("evaluate", fitted, "net.py:build", "other.npz")
    assert result.exit_code == 1
    assert "no target" in result.stderr


def test_regression_from_end_to_end(home: Path) -> None:
    fit = call(
        *("fit", "net.py:regression", "values.npz[:80]", "--validation", "values.npz[80:100]"),
        *("--likelihood", "regression", "--no-progress", "--output", "bnn"),
    )
    assert fit.exit_code == 0, fit.output
    judged = call("evaluate", "bnn", "net.py:regression", "values.npz[100:]")
    assert judged.exit_code == 0
    assert "RMSE" in judged.output
    predicted = call("predict", "bnn", "net.py:regression", "values.npz[100:]")
    assert predicted.stdout.startswith("mean,std,aleatoric,epistemic\n")


def test_every_bayesify_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BayesifyError("of whatever kind")

    monkeypatch.setattr("bayesify.demo.run", fail)
    result = call("demo")
    assert (result.exit_code, result.stderr) == (1, "error: of whatever kind\n")


@pytest.mark.parametrize("name", ["memers", "epochs"])
def test_what_is_no_setting_is_named_with_those_there_are(home: Path, name: str) -> None:
    """`epochs` is the method's, and yet no setting of it: it is an option of `fit`."""
    result = call("plan", "net.py:build", "--set", f"{name}=3")
    assert result.exit_code == 1
    assert f"abnn has no setting '{name}'. Its settings are: noise, draws, members" in result.stderr


def test_ctrl_c_in_a_finaliser_is_not_lost() -> None:
    class Held:
        pass

    def finalise() -> None:
        raise KeyboardInterrupt

    def stop() -> None:
        held = Held()
        weakref.finalize(held, finalise)
        del held  # Python ignores the exception here
        time.sleep(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    try:
        with pytest.raises(KeyboardInterrupt), heeded_interrupts():
            stop()
    finally:
        signal.signal(signal.SIGINT, before)
