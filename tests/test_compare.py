"""compare: what it measures, what it does again and what not, and what it writes."""

import csv
import functools
import importlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import bayesify
from bayesify import ABNN, IBNN, MAP, DeepEnsemble, MCDropout, Temperature, compare, trials
from bayesify.cli import app
from bayesify.errors import BayesifyWarning, SettingError
from bayesify.evaluation import bootstrap, page
from bayesify.evaluation.calibration import classwise_calibration_error
from bayesify.evaluation.classification import brier_parts
from bayesify.evaluation.contract import check
from bayesify.evaluation.page import write_report
from bayesify.files import read_json
from bayesify.identity import digest, identify_data, identify_function
from bayesify.model import BayesianModel
from bayesify.training import Fit

pytestmark = pytest.mark.filterwarnings("ignore:.*training did not help")
module = importlib.import_module("bayesify.compare")
QUICK = {"map": MAP(), "temperature": Temperature(), "mc-dropout": MCDropout(draws=4, rate=0.1)}
MEASURES = [
    *("accuracy", "nll", "ece", "brier", "aurc"),
    *("accuracy_at_80", "accuracy_at_90", "accuracy_at_95", "adaptive_ece"),
]
WITHOUT_INTERVAL = [
    *("classwise_ece", "brier_reliability", "brier_resolution", "brier_uncertainty"),
    *("brier_within", "mistakes_auroc", "mistakes_aupr", "mistakes_fpr95"),
    "mistakes_aupr_inside",
]
DETECTION = ["auroc", "aupr", "fpr95", "aupr_inside"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few resamples, and a page that tests of its own look at."""
    monkeypatch.setattr(bootstrap.resample, "__kwdefaults__", {"seed": 0, "resamples": 100})
    monkeypatch.setattr(trials, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(page, "write_report", lambda results, path: path.write_text("<!doctype"))


@pytest.fixture
def strange() -> DataLoader:
    return DataLoader(TensorDataset(3 * torch.randn(60, 1, 8, 8)), batch_size=50)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that were fitted, by class."""
    done: list[str] = []
    usual = BayesianModel.fit

    def fit(self: BayesianModel, *args: Any, **kwargs: Any) -> Any:
        done.append(type(self.method).__name__)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(BayesianModel, "fit", fit)
    return done


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that were gone through to measure."""
    done: list[str] = []
    usual = trials.answers.ask

    def ask(model: BayesianModel, loader: Any, name: str, **more: Any) -> Any:
        done.append(name)
        return usual(model, loader, name, **more)

    monkeypatch.setattr(trials.answers, "ask", ask)
    return done


@pytest.fixture
def run(
    trained: nn.Module,
    loader: DataLoader,
    validation: DataLoader,
    test_set: DataLoader,
    strange: DataLoader,
    tmp_path: Path,
) -> Callable[..., bayesify.Comparison]:
    usual = {
        "test": test_set,
        "validation": validation,
        "calibration": validation,
        "ood": {"strange": strange},
        "methods": QUICK,
        "shift": None,
        "output": tmp_path / "out",
        "progress": False,
    }
    return lambda **changed: compare(trained, loader, **usual | changed)


def numbers(content: Any) -> Iterator[float]:
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from numbers(part)
    elif isinstance(content, float):
        yield content


def test_results_have_all_that_the_report_reads(
    run: Any, trained: nn.Module, tmp_path: Path
) -> None:
    with pytest.warns(BayesifyWarning, match="no curve"):
        found = run(shift="gaussian", classes=["a", "b", "<c>", "d"])
    results = read_json(tmp_path / "out" / "results.json")
    assert results == json.loads(json.dumps(found.results))
    check(results)
    assert all(math.isfinite(number) for number in numbers(results))
    assert results["baseline"] == "map"
    assert results["classes"] == ["a", "b", "<c>", "d"]
    assert results["data"] == {"test": {"name": "test", "examples": 150}, "ood": {"strange": 60}}
    assert list(results["methods"]) == list(QUICK)
    for name, method in results["methods"].items():
        assert list(method["measures"]) == MEASURES + WITHOUT_INTERVAL
        assert list(method["ood"]["strange"]) == DETECTION
        compared = [method["measures"][measure] for measure in MEASURES]
        for cell in (*compared, *method["ood"]["strange"].values()):
            assert cell["low"] <= cell["value"] <= cell["high"]
        for measure in WITHOUT_INTERVAL:
            cell = method["measures"][measure]
            assert (cell["low"], cell["high"], cell["better"]) == (None, None, None)
        assert method["settings"] == json.loads(json.dumps(QUICK[name].to_dict()))
        assert set(method["cost"]) == {
            "fit_seconds", "calibrate_seconds", "relative_time", "bytes", "peak_bytes"
        }  # fmt: skip
        assert all(spent >= 0 for spent in method["cost"].values())
        assert method["cost"]["bytes"] > 0
        curves = method["curves"]
        assert sum(curves["reliability"]["count"]) == 150
        assert len(curves["risk_coverage"]["risk"]) <= 200
        assert sum(curves["entropy"]["test"]) == pytest.approx(1)
        assert sum(curves["entropy"]["ood"]["strange"]) == pytest.approx(1)
        assert curves["shift"] is None
        assert sum(row["examples"] for row in method["per_class"]) == 150
        for kind in ("most_epistemic", "most_aleatoric", "most_uncertain_ood"):
            assert len(method["examples"][kind]) == 8
        assert all(x["label"] != x["target"] for x in method["examples"]["surest_wrong"])
        assert method["examples"]["most_aleatoric"][0]["image"].startswith("data:image/png;base64,")
        loaded = bayesify.load(tmp_path / "out" / name, trained)
        assert (loaded.temperature, loaded.slope) == (method["temperature"], method["slope"])


def test_values_are_those_of_evaluate(
    run: Any, trained: nn.Module, test_set: DataLoader, strange: DataLoader, tmp_path: Path
) -> None:
    found = run()
    bnn = bayesify.load(tmp_path / "out" / "mc-dropout", trained)
    report = bnn.evaluate(test_set, ood={"strange": strange})
    method = found.methods["mc-dropout"]
    for name in ("accuracy", "nll", "ece", "adaptive_ece", "brier", "aurc", "mistakes_auroc"):
        assert method["measures"][name]["value"] == pytest.approx(getattr(report, name), abs=1e-6)
    for name in DETECTION:
        expected = getattr(report.ood["strange"], name)
        assert method["ood"]["strange"][name]["value"] == pytest.approx(expected, abs=1e-6)
    surest = method["examples"]["surest_wrong"][0]
    prediction = bnn.predict(test_set)
    target = torch.cat([y for _, y in test_set])
    values = {name: cell["value"] for name, cell in method["measures"].items()}
    assert values["classwise_ece"] == pytest.approx(
        classwise_calibration_error(prediction.probs, target), abs=1e-6
    )
    for part, value in asdict(brier_parts(prediction.probs, target)).items():
        assert values[f"brier_{part}"] == pytest.approx(value, abs=1e-6)
    assert prediction.label[surest["index"]] == surest["label"]
    wrong = prediction.label != target
    assert surest["confidence"] == pytest.approx(prediction.confidence[wrong].max().item())


def test_a_second_run_does_nothing_again(run: Any, fits: list[str], asked: list[str]) -> None:
    first = run()
    assert fits == ["Temperature", "MCDropout"]
    assert asked == ["test", "strange"] * 3
    fits.clear()
    asked.clear()
    assert run().results == first.results
    assert (fits, asked) == ([], [])


def test_only_what_changed_is_done_again(
    run: Any, fits: list[str], asked: list[str], tmp_path: Path, test_set: DataLoader
) -> None:
    run()
    fits.clear()
    asked.clear()
    run(methods=QUICK | {"mc-dropout": MCDropout(draws=4, rate=0.2)})
    assert (fits, asked) == (["MCDropout"], ["test", "strange"])
    fits.clear()
    asked.clear()
    # Another set is measured on what was fitted.
    run(methods=["temperature"], ood={"itself": test_set})
    assert (fits, asked) == ([], ["test", "itself"] * 2)
    asked.clear()
    # Another number of epochs does not concern the network itself.
    run(methods=["temperature"], ood={"itself": test_set}, epochs=2)
    assert (fits, asked) == (["Temperature"], ["test", "itself"])
    # Nor is a folder trusted that was changed since.
    fits.clear()
    other = tmp_path / "out" / "temperature" / "bayesify.json"
    other.write_text(other.read_text().replace('"temperature": ', '"temperature":  '))
    run(methods=["temperature"], ood={"itself": test_set}, epochs=2)
    assert fits == ["Temperature"]


def test_other_weights_or_labels_are_another_run(
    run: Any, trained: nn.Module, test_set: DataLoader, asked: list[str]
) -> None:
    run(methods=["map"])
    asked.clear()
    x, y = test_set.dataset.tensors
    y = y.clone()
    y[77] = (y[77] + 1) % 4
    run(methods=["map"], test=DataLoader(TensorDataset(x, y), batch_size=50))
    assert asked == ["test", "strange"]


def test_an_interrupted_run_goes_on(
    run: Any, fits: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = trials.Trials.judge

    def judge(self: Any, bnn: BayesianModel) -> Any:
        if isinstance(bnn.method, MCDropout):
            raise KeyboardInterrupt
        return usual(self, bnn)

    with monkeypatch.context() as patch:
        patch.setattr(trials.Trials, "judge", judge)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert fits == ["Temperature", "MCDropout"]
    assert not (tmp_path / "out" / "results.json").exists()
    fits.clear()
    assert list(run().methods) == list(QUICK)
    assert fits == []  # what was fitted is kept even where it was not measured yet
    assert not list((tmp_path / "out" / "cache").glob("*.safetensors"))


def test_an_interrupted_fit_goes_on(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = BayesianModel.calibrate
    methods = {"map": MAP(), "abnn": ABNN(members=1, draws=2)}

    def calibrate(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BayesianModel, "calibrate", calibrate)
        with pytest.raises(KeyboardInterrupt):
            run(methods=methods)
    kept = list((tmp_path / "out" / "cache").glob("*.safetensors"))
    assert len(kept) == 1
    monkeypatch.setattr(BayesianModel, "calibrate", usual)
    monkeypatch.setattr(Fit, "_step", None)  # no step is left to do
    assert list(run(methods=methods).methods) == ["map", "abnn"]
    assert not kept[0].exists()


def test_a_shuffled_test_set_comes_in_one_order(run: Any, test_set: DataLoader) -> None:
    shuffled = DataLoader(test_set.dataset, batch_size=50, shuffle=True)
    same = {"one": MAP(), "other": MAP(draws=2)}
    found = run(methods=same, test=shuffled, calibration=None)
    one, other = (method["measures"]["nll"] for method in found.methods.values())
    assert one["low"] == pytest.approx(other["low"], abs=1e-6)
    assert one["high"] == pytest.approx(other["high"], abs=1e-6)


def test_a_damaged_record_is_made_again(run: Any, tmp_path: Path) -> None:
    first = run(methods=["map"])
    for file in (tmp_path / "out" / "cache").iterdir():
        file.write_text("{")
    again = run(methods=["map"])
    assert again.methods["map"]["measures"] == first.methods["map"]["measures"]


def test_identical_methods_are_within_noise(run: Any) -> None:
    same = {"one": MAP(), "other": MAP(draws=4)}
    found = run(methods=same, calibration=None)
    assert found.results["baseline"] == "one"
    for cell in found.methods["other"]["measures"].values():
        assert cell["better"] is None
    assert found.methods["other"]["ood"]["strange"]["auroc"]["better"] is None


def test_what_is_beyond_noise_is_said(run: Any, validation: DataLoader) -> None:
    x, y = validation.dataset.tensors
    misled = DataLoader(TensorDataset(x, y[torch.randperm(len(y))]), batch_size=50)
    found = run(methods=["temperature"], calibration=misled)
    assert found.methods["temperature"]["temperature"] > 2
    assert found.methods["temperature"]["measures"]["nll"]["better"] is False
    assert found.methods["temperature"]["measures"]["accuracy"]["better"] is None
    assert "▼" in str(found)


def test_the_table_shows_quality_beside_cost(run: Any) -> None:
    found = run()
    text = str(found)
    for part in ("NLL ↓", "strange: AUROC ↑", "fit, s", "on disk, MB", "peak memory", "≈", " to "):
        assert part in text
    nll = found.methods["temperature"]["measures"]["nll"]["value"]
    assert f"{nll:.4f}" in text
    frame = found.to_pandas()
    assert frame.loc["temperature", "nll"] == nll
    rows = list(csv.DictReader(io.StringIO((found.folder / "results.csv").read_text())))
    assert [row["method"] for row in rows] == list(QUICK)
    assert float(rows[1]["nll"]) == nll
    assert (found.folder / "report.html").read_text().startswith("<!")


def test_nothing_is_written_without_a_folder(run: Any, tmp_path: Path) -> None:
    assert run(output=None, methods=["map"]).folder is None
    assert not any(tmp_path.iterdir())


def test_draws_suit_each_method(run: Any) -> None:
    methods = {"map": MAP(), "ensemble": DeepEnsemble(members=3, draws=3)}
    found = run(methods=methods, draws=4)
    assert [method["draws"] for method in found.methods.values()] == [1, 3]


def test_what_does_not_suit_the_network_is_left_out(
    trained: nn.Module, loader: DataLoader, test_set: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    monkeypatch.setattr(module, "DEFAULT", ("map", "abnn"))
    more = {"test": test_set, "validation": test_set, "shift": None, "progress": False}
    with pytest.warns(BayesifyWarning, match="abnn is left out"):
        found = compare(network, loader, **more)
    assert list(found.methods) == ["map"]
    assert "abnn" in found.results["left_out"]
    with pytest.raises(bayesify.NothingToRandomiseError, match="normalisation"):
        compare(network, loader, methods=["abnn"], **more)


def test_the_usual_methods_exist() -> None:
    found, baseline = module._methods(module.DEFAULT)
    assert baseline == "map"
    assert {"abnn", "bayes-adapter", "ibnn", "temperature", "mc-dropout"} < set(found)


def test_pixels_have_a_curve_of_shift(run: Any, test_set: DataLoader) -> None:
    x, y = test_set.dataset.tensors
    pixels = (x.clamp(-4, 4) + 4) / 8
    test = DataLoader(TensorDataset(pixels, y), batch_size=50)
    curve = run(methods=["map"], test=test, shift="contrast").methods["map"]["curves"]["shift"]
    assert curve["kind"] == "contrast"
    assert curve["severity"][0] == 0
    assert len({len(curve[name]) for name in curve if name != "kind"}) == 1
    accuracy = run(methods=["map"], test=test).methods["map"]["measures"]["accuracy"]["value"]
    assert curve["accuracy"][0] == pytest.approx(accuracy)


def test_without_mistakes_there_are_none_to_find(run: Any, trained: nn.Module) -> None:
    x = torch.randn(60, 1, 8, 8)
    with torch.no_grad():
        test = DataLoader(TensorDataset(x, trained(x).argmax(1)), batch_size=50)
    found = run(methods=["map"], test=test)
    measures = found.methods["map"]["measures"]
    assert list(measures) == MEASURES + WITHOUT_INTERVAL
    assert measures["accuracy"]["value"] == 1
    assert [measures[name]["value"] for name in measures if "mistakes" in name] == [None] * 4
    check(found.results)
    (row,) = csv.DictReader(io.StringIO(found.csv()))
    assert row["mistakes_auroc"] == ""


def test_values_have_their_own_measures(tmp_path: Path) -> None:
    x = torch.randn(120, 4)
    data = TensorDataset(x, x[:, :1] + 0.1 * torch.randn(120, 1))
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    loader = DataLoader(data, batch_size=40)
    found = compare(
        network,
        loader,
        test=loader,
        validation=loader,
        ood={"far": [(10 * x,)]},
        methods={"map": MAP(), "ibnn": IBNN(draws=4, components=2)},
        likelihood="regression",
        output=tmp_path / "out",
        progress=False,
    )
    method = found.methods["ibnn"]
    assert list(method["measures"]) == ["nll", "rmse"]
    assert method["curves"]["reliability"] is None
    assert 0 <= method["ood"]["far"]["auroc"]["value"] <= 1
    check(found.results)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ["nonsense"]}, "nonsense"),
        ({"methods": {"../up": ABNN()}}, "cannot name a folder"),
        ({"methods": {"cache": ABNN()}}, "cannot name a folder"),
        ({"methods": {"map": ABNN()}}, "the network itself"),
        ({"shift": "nonsense"}, "shift="),
        ({"augment": "nonsense"}, "augment="),
        ({"test": iter([])}, "again and again"),
    ],
)
def test_wrong_settings_stop_before_anything_is_done(
    run: Any, changed: dict[str, Any], message: str, fits: list[str]
) -> None:
    with pytest.raises(SettingError, match=message):
        run(**changed)
    assert fits == []


def test_folders_of_others_are_not_touched(run: Any, fits: list[str], tmp_path: Path) -> None:
    theirs = tmp_path / "out" / "temperature" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(SettingError, match="not one of bayesify's"):
        run()
    assert (fits, theirs.read_text()) == ([], "mine")


def test_two_of_a_kind_have_names_of_their_own() -> None:
    found, baseline = module._methods([ABNN(), ABNN(lr=1e-5), "map"])
    assert list(found) == ["map", "abnn", "abnn-2"]
    assert baseline == "map"


def test_identities() -> None:
    x = torch.arange(40.0)
    one, other = TensorDataset(x), TensorDataset(x + 1)
    assert identify_data(DataLoader(one, 5)) == identify_data(DataLoader(one, 5))
    assert identify_data(DataLoader(one, 5)) != identify_data(DataLoader(other, 5))
    assert identify_data([(x,), (x,)]) != identify_data([(x,), (x + 1,)])
    assert identify_data([{"x": x, "name": "a"}]) != identify_data([{"x": x, "name": "b"}])
    pictures = bayesify.data.sets.Images(torch.zeros(5, 8, 8, dtype=torch.uint8))
    assert identify_data(DataLoader(pictures)) != identify_data(DataLoader(one))
    part = torch.utils.data.Subset(one, [1, 2])
    assert identify_data(DataLoader(part)) != identify_data(DataLoader(one))
    first, second = functools.partial(torch.add, 1), functools.partial(torch.add, 2)
    assert identify_function(first) != identify_function(second)
    assert identify_function(numbers) != identify_function(test_identities)
    assert identify_function(nn.Dropout(0.1)) != identify_function(nn.Dropout(0.2))
    assert identify_function(None) is None
    assert digest([1]) != digest(["1"])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "write_report", write_report)
    arguments = [
        *("compare", "digits", "digits:train[:60]", "--test", "digits:test[:80]"),
        *("--validation", "digits:validation[:50]", "--ood", "noise=digits-noise[:40]"),
        *("--method", "map", "--method", "temperature", "--set", "temperature.draws=1"),
        *("--no-progress", "--output", str(tmp_path / "out")),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Temperature" in result.output
    assert "noise: AUROC" in result.output
    assert "results.json" in result.output
    results = read_json(tmp_path / "out" / "results.json")
    assert results["data"]["test"] == {"name": "digits:test[:80]", "examples": 80}
    assert results["methods"]["temperature"]["curves"]["shift"]["kind"] == "gaussian"
    assert results["command"].startswith("bayesify")
    for wrong, code in (("abnn.draws=2", 2), ("draws=2", 2), ("temperature.nonsense=2", 1)):
        bad = CliRunner().invoke(app, [*arguments, "--set", wrong])
        assert bad.exit_code == code, bad.output
        assert "Traceback" not in bad.output
