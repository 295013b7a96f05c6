"""`bayesify predict` and `evaluate` on what users have: images, folders, tables, damaged files."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

from bayesify import ABNN, Prediction, convert, load
from bayesify.cli import app
from bayesify.data import Readable
from bayesify.errors import SettingError
from bayesify.evaluation.calibration import adaptive_calibration_error
from bayesify.evaluation.selective import aurc, choose_threshold
from bayesify.model import BayesianModel
from bayesify.table import PredictionTable, learn_threshold, write_csv, write_json_lines
from bayesify.zoo import load_model

NETWORKS = """
import torch
from torch import nn

def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(6, 3))

def numbers(outputs=3):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, outputs))
    network[3].weight.data *= 6
    return network

def value():
    return numbers(1)
"""
NAMES = [f"{number}.png" for number in range(7)]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def predict(network: str, *arguments: object) -> Result:
    return call("predict", network, f"net.py:{network}", *arguments)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Networks made Bayesian and not fitted, and data of every kind."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORKS)
    for name in ("images", "numbers", "value"):
        likelihood = "regression" if name == "value" else "classification"
        method = ABNN(members=2, draws=4, noise=0.5)
        convert(load_model(f"net.py:{name}"), method, likelihood=likelihood).save(name)
    generator = np.random.default_rng(0)
    Path("photos").mkdir()
    for name in NAMES:
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(Path("photos") / name)
    x = 3 * generator.normal(size=(60, 4)).astype(np.float32)
    with torch.no_grad():
        probs = load_model("net.py:numbers")(torch.from_numpy(x)).softmax(1)
    y = probs.argmax(1).numpy()
    wrong = probs.amax(1).argsort()[:16:2].numpy()
    y[wrong] = (y[wrong] + 1) % 3
    np.savez("data.npz", x=x, y=y)
    table = "\n".join(",".join(map(str, [*row, label])) for row, label in zip(x, y, strict=True))
    Path("data.csv").write_text(f"a,b,c,d,y\n{table}\n")
    return tmp_path


@pytest.fixture
def damaged(home: Path) -> Path:
    for name in ("1.png", "2.png", "5.png"):
        Path("photos", name).write_bytes(b"no image")
    return home


@pytest.fixture
def labelled(damaged: Path) -> Path:
    """The damaged photos in two classes."""
    for number, name in enumerate(NAMES):
        folder = Path("photos", "ab"[number % 2])
        folder.mkdir(exist_ok=True)
        Path("photos", name).rename(folder / name)
    return damaged


class TestInputs:
    def test_a_table_is_as_good_as_arrays(self, home: Path) -> None:
        arrays, table = predict("numbers", "data.npz"), predict("numbers", "data.csv")
        assert table.exit_code == 0, table.output
        assert table.stdout == arrays.stdout
        assert len(rows_of(table.stdout)) == 60

    def test_folder_and_images_by_name_are_one_batch(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = predict("images", "photos")
        assert folder.exit_code == 0, folder.output
        rows = rows_of(folder.stdout)
        assert list(rows[0])[:3] == ["file", "label", "confidence"]
        assert [row["file"] for row in rows] == [f"photos/{name}" for name in NAMES]
        sizes: list[int] = []
        real = BayesianModel.predict

        def note(self: BayesianModel, x: Any, **settings: Any) -> Prediction:
            sizes.append(len(x))
            return real(self, x, **settings)

        monkeypatch.setattr(BayesianModel, "predict", note)
        named = predict("images", *(f"photos/{name}" for name in NAMES))
        assert named.stdout == folder.stdout
        assert sizes == [7]

    def test_several_data_sets_are_told_apart(self, home: Path) -> None:
        result = predict("numbers", "data.csv[:2]", "data.npz[:1]", "data.csv[:2]")
        files = [row["file"] for row in rows_of(result.stdout)]
        assert files == ["data.csv[:2]"] * 2 + ["data.npz[:1]"] + ["data.csv[:2]"] * 2

    def test_a_name_that_is_not_utf8(self, home: Path) -> None:
        Path("photos/6.png").rename(os.fsdecode(b"photos/\xff.png"))
        result = predict("images", "photos", "--output", "p.jsonl")
        assert result.exit_code == 0, result.output
        assert json.loads(Path("p.jsonl").read_text().splitlines()[-1])["file"].endswith("dcff.png")


class TestUnreadable:
    def test_images_are_listed_and_left_out(self, damaged: Path) -> None:
        result = predict("images", "photos", "--batch-size", 2, "--output", "p.csv")
        assert result.exit_code == 0
        assert result.stdout == "wrote p.csv\n"
        assert result.stderr == (
            "warning: 3 of 7 images cannot be read and are left out: photos/1.png, photos/2.png, "
            "photos/5.png\n"
        )
        files = [row["file"] for row in rows_of(Path("p.csv").read_text())]
        assert files == [f"photos/{number}.png" for number in (0, 3, 4, 6)]

    def test_nothing_to_read_is_an_error_and_writes_nothing(self, damaged: Path) -> None:
        result = predict("images", "photos/1.png", "photos/2.png", "--output", "p.csv")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: none of 2 images can be read. The first: photos/1")
        assert not list(damaged.glob("*p.csv*"))

    def test_evaluate_goes_past_them_too(self, labelled: Path) -> None:
        result = call("evaluate", "images", "net.py:images", "photos", "--output", "r.json")
        assert result.exit_code == 0, result.output
        assert result.stderr.count("warning: 3 of 7 images cannot be read") == 1
        assert json.loads(Path("r.json").read_text())["ABNN"]["examples"] == 4

    def test_fit_and_plan_do_too(self, labelled: Path) -> None:
        result = call("plan", "net.py:images", "--last", 1, "--example", "photos")
        assert result.exit_code == 0, result.output
        more = ("--validation", "photos[:4]", "--last", 1, "--output", "fitted", "--no-progress")
        result = call("fit", "net.py:images", "photos", *more)
        assert result.exit_code == 0, result.output
        # The first four are those of class a, of which 2.png is one.
        said = "cannot be read and are left out: photos/a/2.png"
        assert f"warning: 3 of 7 images {said}, photos/b/1.png, photos/b/5.png\n" in result.stderr
        assert f"warning: 1 of 4 images {said}\n" in result.stderr
        assert result.stderr.count("cannot be read") == 2
        assert Path("fitted").is_dir()

    def test_compare_does_too(self, labelled: Path) -> None:
        more = ("--test", "photos", "--method", "map", "--shift", "none", "--no-progress")
        result = call("compare", "net.py:images", "photos", *more)
        assert result.exit_code == 0, result.output
        assert result.stderr.count("warning: 3 of 7 images cannot be read") == 2
        results = json.loads(Path("bayesify-compare/results.json").read_text())
        assert results["data"]["test"] == {"name": "photos", "examples": 4}
        assert results["classes"] == ["a", "b"]

    def test_nothing_to_read_stops_before_training(self, damaged: Path) -> None:
        Path("bad/a").mkdir(parents=True)
        Path("bad/a/0.png").write_bytes(b"no image")
        result = call("fit", "net.py:images", "bad", "--output", "fitted")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: none of 1 images can be read. The first: bad/a/0")
        assert not Path("fitted").exists()


class TestOutput:
    @pytest.mark.parametrize("name", ["p.jsonl", "p.NDJSON"])
    def test_json_lines_say_the_same_as_csv(self, home: Path, name: str) -> None:
        command = ("numbers", "data.npz", "--abstain-above", 0.7, "--output")
        shown = predict(*command, "-")
        assert predict(*command, name).exit_code == 0
        lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
        rows = rows_of(shown.stdout)
        assert len(lines) == len(rows) == 60
        for line, row in zip(lines, rows, strict=True):
            assert list(line) == list(row)
            assert row["label"] == ("" if line["label"] is None else str(line["label"]))
            assert row["abstained"] == str(line["abstained"]).lower()
            for column in ("confidence", "entropy", "aleatoric", "epistemic", "prob_2"):
                assert float(row[column]) == line[column]

    def test_batches_do_not_matter_and_are_written_as_they_come(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = predict("numbers", "data.npz").stdout
        real, seen = BayesianModel.predict, 0

        def interrupt(self: BayesianModel, x: Any, **settings: Any) -> Prediction:
            nonlocal seen
            seen += 1
            if seen == 3:
                raise KeyboardInterrupt
            return real(self, x, **settings)

        monkeypatch.setattr(BayesianModel, "predict", interrupt)
        result = predict("numbers", "data.npz", "--batch-size", 10)
        assert result.exit_code == 130
        ours, theirs = rows_of(result.stdout), rows_of(whole)[:20]
        assert [row["label"] for row in ours] == [row["label"] for row in theirs]
        for row, other in zip(ours, theirs, strict=True):
            assert float(row["entropy"]) == pytest.approx(float(other["entropy"]), rel=1e-4)

    def test_an_interrupted_file_is_not_there(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        Path("p.csv").write_text("before")
        monkeypatch.setattr(BayesianModel, "predict", interrupt)
        assert predict("numbers", "data.npz", "--output", "p.csv").exit_code == 130
        assert Path("p.csv").read_text() == "before"
        assert [path.name for path in home.glob("*p.csv*")] == ["p.csv"]

    def test_cells_that_need_quotes(self) -> None:
        stream = io.StringIO()
        write_csv([{"file": 'a, "b"\n.png', "label": None}], stream)
        assert rows_of(stream.getvalue()) == [{"file": 'a, "b"\n.png', "label": ""}]
        stream = io.StringIO()
        write_json_lines([{"x": 1 / 3, "n": 12345678}], stream)
        assert stream.getvalue() == '{"x": 0.333333, "n": 12345678}\n'


class TestTolerance:
    def test_easy_examples_stop_early_and_the_table_says_so(self, home: Path) -> None:
        command = ("numbers", "data.npz", "--draws", 24, "--tolerance")
        result = predict(*command, 0.1)
        assert result.exit_code == 0, result.output
        with np.load("data.npz") as arrays:
            x = torch.from_numpy(arrays["x"])
        expected = load("numbers", load_model("net.py:numbers")).predict(x, draws=24, tolerance=0.1)
        rows = rows_of(result.stdout)
        assert [int(row["used"]) for row in rows] == expected.used.tolist()
        assert [int(row["label"]) for row in rows] == expected.label.tolist()
        assert {8, 24} <= set(expected.used.tolist())
        assert "used" not in rows_of(predict("numbers", "data.npz").stdout)[0]

    def test_a_threshold_by_risk_is_learned_with_the_same_tolerance(self, home: Path) -> None:
        chosen = predict(
            *("numbers", "data.npz", "--target-risk", 0.08, "--validation", "data.csv"),
            *("--draws", 24, "--tolerance", 0.1),
        )
        assert chosen.exit_code == 0, chosen.output
        with np.load("data.npz") as arrays:
            x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        bnn = load("numbers", load_model("net.py:numbers"))
        values = []
        for tolerance in (0.1, None):
            p = bnn.predict(x, draws=24, tolerance=tolerance)
            values.append(choose_threshold(p.entropy, p.label == y, 0.08).value)
        assert float(chosen.stderr.split()[2]) == pytest.approx(values[0], abs=1e-6)
        assert values[0] != pytest.approx(values[1], abs=1e-6)

    def test_it_must_be_above_0(self, home: Path) -> None:
        result = predict("numbers", "data.npz", "--tolerance", 0, "--output", "p.csv")
        assert result.exit_code == 1
        assert "tolerance=0.0 must be a number above 0" in result.stderr
        assert not Path("p.csv").exists()


class TestAbstention:
    def test_above_a_threshold_there_is_no_label(self, home: Path) -> None:
        result = predict("numbers", "data.npz", "--abstain-above", 0.7)
        rows = rows_of(result.stdout)
        silent = [row["abstained"] == "true" for row in rows]
        assert silent == [float(row["entropy"]) > 0.7 for row in rows]
        assert silent == [row["label"] == "" for row in rows]
        assert 0 < sum(silent) < 60
        assert result.stderr == f"answered {60 - sum(silent)} of 60, abstained from {sum(silent)}\n"

    def test_regression_abstains_by_its_standard_deviation(self, home: Path) -> None:
        deviations = [float(row["std"]) for row in rows_of(predict("value", "data.npz").stdout)]
        limit = float(np.median(deviations))
        rows = rows_of(predict("value", "data.npz", "--abstain-above", limit).stdout)
        assert sum(row["mean"] == "" for row in rows) == sum(std > limit for std in deviations)

    def test_a_threshold_by_risk_is_that_of_choose_threshold(self, home: Path) -> None:
        chosen = predict(
            *("numbers", "data.npz", "--target-risk", 0.08, "--validation", "data.csv"),
            *("--batch-size", 60),
        )
        assert chosen.exit_code == 0, chosen.output
        with np.load("data.npz") as arrays:
            x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        prediction = load("numbers", load_model("net.py:numbers")).predict(x)
        expected = choose_threshold(prediction.entropy, prediction.label == y, 0.08)
        assert 0 < expected.coverage < 1
        assert f"abstaining above {expected.value!r} nats" in chosen.stderr
        assert f"answers {expected.coverage:.1%}, and {expected.risk:.2%}" in chosen.stderr
        # The same data again: what was expected is what happens, and the number can be reused.
        rows = rows_of(chosen.stdout)
        assert sum(row["label"] != "" for row in rows) == round(60 * expected.coverage)
        reused = predict("numbers", "data.npz", "--abstain-above", repr(expected.value))
        assert reused.stdout == chosen.stdout

    def test_a_confidence_costs_answers(self, home: Path) -> None:
        common = ("numbers", "data.npz", "--target-risk", 0.15, "--validation", "data.csv")
        sure = predict(*common, "--confidence", 0.9)
        assert sure.exit_code == 0, sure.output
        assert "(on new data at most " in sure.stderr

        def answered(result: Result) -> int:
            return sum(row["label"] != "" for row in rows_of(result.stdout))

        assert answered(sure) < answered(predict(*common))

    def test_risks_that_cannot_be_kept_and_data_without_labels(self, home: Path) -> None:
        np.savez("wrong.npz", x=np.zeros((2, 4)), y=[0, 1])
        result = predict("numbers", "data.npz", "--target-risk", 0.01, "--validation", "wrong.npz")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "no threshold keeps the risk at 0.01" in result.stderr
        np.savez("bare.npz", x=np.zeros((2, 4)))
        result = predict("numbers", "data.npz", "--target-risk", 0.01, "--validation", "bare.npz")
        assert result.exit_code == 1
        assert "no target" in result.stderr

    def test_a_risk_is_for_classes(self, home: Path) -> None:
        result = predict("value", "data.npz", "--target-risk", 0.1, "--validation", "data.npz")
        assert result.exit_code == 1
        assert "only classification has" in result.stderr

    def test_void_labels_do_not_count(self) -> None:
        model = convert(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)))
        x = torch.randn(20, 4)
        label = model.predict(x).label
        label[::2] = -100
        assert learn_threshold(model, [(x, label)], 0.01).coverage == 1

    def test_multilabel_keeps_its_probabilities(self) -> None:
        model = convert(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)),
            likelihood="multilabel",
        )
        table = PredictionTable(model, threshold=0.0)
        rows = list(table.rows(Readable(TensorDataset(torch.randn(5, 4)), 2)))
        assert (table.examples, table.abstained) == (5, 5)
        assert all(row["abstained"] and 0 < row["prob_7"] < 1 for row in rows)
        with pytest.raises(SettingError, match="only classification has"):
            learn_threshold(model, [], 0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--output", "p.xlsx"), "name it .csv"),
        (("--output", "p"), "name it .csv"),
        (("--abstain-above", "-1"), "--abstain-above"),
        (("--abstain-above", "nan"), "--abstain-above"),
        (("--abstain-above", "1", "--target-risk", "0.1", "--validation", "data.npz"), "not both"),
        (("--target-risk", "0.1"), "go together"),
        (("--validation", "data.npz"), "go together"),
        (("--target-risk", "2", "--validation", "data.npz"), "--target-risk"),
        (("--confidence", "0.9"), "--target-risk"),
    ],
)
def test_wrong_usage_ends_with_2(options: tuple[str, ...], said: str, home: Path) -> None:
    result = predict("numbers", "data.npz", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


class TestEvaluate:
    def test_numbers_are_those_of_the_measures(self, home: Path) -> None:
        result = call("evaluate", "numbers", "net.py:numbers", "data.csv", "--output", "r.json")
        assert result.exit_code == 0, result.output
        numbers = json.loads(Path("r.json").read_text())["ABNN"]
        with np.load("data.npz") as arrays:
            x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        prediction = load("numbers", load_model("net.py:numbers")).predict(x)
        right = prediction.label == y
        assert numbers["aurc"] == pytest.approx(aurc(prediction.entropy, right))
        expected = adaptive_calibration_error(prediction.confidence, right)
        assert numbers["adaptive_ece"] == pytest.approx(expected)
        expected = roc_auc_score(~right, prediction.entropy)
        assert numbers["mistakes_auroc"] == pytest.approx(expected)
        for title in ("adaptive ECE", "AURC", "AUROC of mistakes"):
            assert title in result.stdout

    def test_where_no_answer_is_wrong_there_is_nothing_to_detect(self, home: Path) -> None:
        with np.load("data.npz") as arrays:
            x = arrays["x"]
        with torch.no_grad():
            y = load_model("net.py:numbers")(torch.from_numpy(x)).argmax(1).numpy()
        np.savez("right.npz", x=x, y=y)
        wild = ABNN(members=1, draws=1, noise=5.0)  # so that it makes mistakes of its own
        convert(load_model("net.py:numbers"), wild).save("wild")
        result = call("evaluate", "wild", "net.py:numbers", "right.npz", "--output", "r.json")
        assert result.exit_code == 0, result.output
        numbers = json.loads(Path("r.json").read_text())
        assert numbers["network"]["aurc"] == 0
        assert "mistakes_auroc" not in numbers["network"]
        (line,) = [line for line in result.stdout.splitlines() if "mistakes" in line]
        assert line.replace("│", " ").split()[4] == "-"
