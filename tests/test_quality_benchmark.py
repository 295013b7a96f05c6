"""The harness of `make bench-quality`: what it does around the measuring."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesify
from bayesify import ABNN
from bayesify.evaluation.calibration import bin_sums, gap
from benchmarks.quality import __main__ as command
from benchmarks.quality import (
    bars,
    extras,
    headline,
    labels,
    markdown,
    measures,
    plots,
    tables,
    units,
)
from benchmarks.quality.results import Results, write_json
from benchmarks.quality.settings import ABLATIONS, FULL, METHODS, QUICK
from benchmarks.quality.units import Unit

PACKAGE = Path(command.__file__).parent
NETWORK = "cifar10-resnet20"
ONE, TWO = Unit(NETWORK, "ABNN", 0, "fit"), Unit(NETWORK, "ABNN", 0, "train-only")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "quality")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(labels, "LOG", tmp_path / "log" / "test_labels.log")
    return labels.LOG


def stub(monkeypatch: pytest.MonkeyPatch, fail: str = "") -> list[str]:
    """Work that only notes what was asked for."""
    ran: list[str] = []

    def work(unit: Unit, size: Any) -> dict[str, Any]:
        ran.append(unit.what)
        if unit.what == fail:
            raise RuntimeError("on purpose")
        return {"nll": 0.5}

    monkeypatch.setattr(command, "WORK", dict.fromkeys(command.WORK, work))
    return ran


# Units


def test_headline_has_every_method_network_and_seed_once() -> None:
    found = units.units(FULL)
    assert len(set(found)) == len(found)
    every = {(n, m, s) for n in FULL.networks for m in METHODS for s in FULL.seeds}
    trained = {(n, m, s) for n, m, s in every if m != "MAP"}
    once = {(n, m, s) for n, m, s in trained if s == 0 or m == "Mixture"}
    plain = trained | {(n, "MAP", 0) for n in FULL.networks}
    sought = {"fit": trained, "train-only": plain, **dict.fromkeys(units.CALIBRATED, once)}
    for what, wanted in sought.items():
        assert {(u.network, u.method, u.seed) for u in found if u.what == what} == wanted


def test_every_unit_can_be_run_and_asked_about() -> None:
    for size in (FULL, QUICK):
        for unit in units.units(size):
            assert unit.what in command.WORK
            json.dumps(units.asked(unit, size))


def test_every_fit_comes_before_what_is_measured_on_it() -> None:
    found = units.units(FULL)
    fit = {(u.network, u.method, u.seed): i for i, u in enumerate(found) if u.what == "fit"}
    for i, unit in enumerate(found):
        assert fit.get((unit.network, unit.method, unit.seed), -1) <= i


def test_patterns_choose_units_by_name() -> None:
    found = units.chosen(units.units(FULL), ["*/ABNN/seed1/*", "*/MAP/*/fgsm"])
    assert {(u.method, u.seed) for u in found} == {("ABNN", 1), ("MAP", 0)}
    assert units.chosen(units.units(FULL), []) == units.units(FULL)


def test_only_ablations_keep_the_last_state() -> None:
    last = {u for u in units.units(FULL) if units.fit_settings(u).get("keep") == "last"}
    assert {u.method for u in last} == set(FULL.ablations)


def test_draws_of_all_ablations_are_the_defaults() -> None:
    for name, method in ABLATIONS.items():
        assert method.draws == METHODS[name.partition("-")[0]].draws


@pytest.mark.parametrize("components", [1, 3, 4])
def test_draw_counts_have_equally_many_of_each_component(components: int) -> None:
    counts = extras.draw_counts(components)
    assert all(count % components == 0 for count in counts)
    assert counts == sorted(set(counts))
    assert counts[0] == components
    assert abs(counts[-1] - 64) <= components


# Running and resuming


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = stub(monkeypatch, fail="fit")
    assert command.run([ONE, TWO], QUICK, results) == 1
    assert ran == ["fit", "train-only"]
    assert "on purpose" in capsys.readouterr().err
    assert command.run([ONE, TWO], QUICK, results) == 1
    assert ran == ["fit", "train-only", "fit"]


def test_a_result_of_other_settings_is_stale_and_made_again(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = stub(monkeypatch)
    asked = units.asked(ONE, QUICK)
    assert results.state(ONE, asked) == "open"
    command.run([ONE], QUICK, results)
    assert results.state(ONE, asked) == "done"
    monkeypatch.setitem(units.FIT, "epochs", 7)
    assert results.state(ONE, units.asked(ONE, QUICK)) == "stale"
    command.run([ONE], QUICK, results)
    assert ran == ["fit", "fit"]
    assert results.state(ONE, units.asked(ONE, QUICK)) == "done"


def test_records_say_what_was_asked_and_by_which_code(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch)
    command.run([ONE], QUICK, results)
    ((unit, record),) = results.read().items()
    assert unit == ONE
    assert record["found"] == {"nll": 0.5}
    assert record["asked"]["method"] == repr(METHODS["ABNN"])
    assert record["made"]["commit"]
    assert record["seconds"] >= 0


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "one.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(file, {"a": 2, "b": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert [path.name for path in file.parent.iterdir()] == ["one.json"]


def test_list_shows_states_and_a_pattern_that_fits_nothing_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--quick", "--list", "--only", "*/iBNN/*/fit"]) == 0
    assert re.fullmatch(r"(open|done|stale) +\S+/iBNN/seed0/fit\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--list", "--only", "nothing"])


# Test labels


def test_reading_test_labels_is_logged(tmp_path: Path, log: Path) -> None:
    file = tmp_path / "some.npz"
    np.savez(file, x=np.zeros((6, 3, 4, 4), np.float32), y=np.arange(6))
    labels.images(f"{file}[:4]")
    assert not log.exists()
    assert labels.test_labels(f"{file}[:4]", ONE.name).tolist() == [0, 1, 2, 3]
    data = labels.test_data(f"{file}[4:]", TWO.name)
    assert data.tensors[1].tolist() == [4, 5]
    first, second = log.read_text().splitlines()
    assert re.fullmatch(
        rf"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ {ONE.name} \S+ 4 images .*\[:4\]", first
    )
    assert f" {TWO.name} " in second
    assert " 2 images " in second


def test_test_images_are_no_training_data() -> None:
    with pytest.raises(ValueError, match="no training data"):
        labels.training_data("cifar10:test[:10]")


def test_one_file_alone_reads_data() -> None:
    reading = {
        path.name
        for path in PACKAGE.glob("*.py")
        if re.search(r"load_data|np\.load|labels\.npz", path.read_text())
    }
    assert reading == {"labels.py"}


# Measures


def test_measures_of_known_predictions() -> None:
    probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.5, 0.5]])
    found = measures.quality(probs[:2], torch.tensor([0, 1]))
    assert found["accuracy"] == 0.5
    assert found["ece"] == pytest.approx(0.3)
    assert found["nll"] == pytest.approx(-(np.log(0.8) + np.log(0.2)) / 2)
    assert found["brier"] == pytest.approx((0.08 + 1.28) / 2)
    assert measures.entropy(probs)[2].item() == pytest.approx(np.log(2))
    assert measures.detection(probs[:2], {"other": probs[2:]})["other"]["auroc"] == 1


def test_perfect_predictions_have_the_calibration_error_of_luck() -> None:
    confidence = 0.5 + 0.5 * torch.rand(5000, generator=torch.Generator().manual_seed(0)).sqrt()
    luck = torch.rand(200, 5000, generator=torch.Generator().manual_seed(1)) < confidence
    sums = [bin_sums(confidence, right) for right in luck]
    errors = torch.stack([gap(each) for each in sums])
    expected = measures.perfect_ece(sums[0].tolist())
    assert abs(errors.mean().item() - expected) < 4 * errors.std().item() / 200**0.5


@pytest.mark.parametrize("part", [slice(60), slice(1, 60, 2), slice(30, 60)])
def test_kept_predictions_are_what_the_model_would_predict(
    part: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headline, "CACHE", tmp_path / "cache")
    file = tmp_path / "some.npz"
    x = np.random.default_rng(0).random((60, 3, 4, 4), np.float32)
    np.savez(file, x=x, y=np.zeros(60, np.int64))
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 5)).eval()
    bnn = bayesify.convert(network, ABNN(noise=0.5))

    def found() -> torch.Tensor:
        return headline.predicted(bnn, ONE, QUICK, str(file), part)[0]

    def wanted() -> torch.Tensor:
        rows = labels.images(headline.rows(str(file), part))
        return bnn.predict(rows, seed=ONE.seed).probs

    headline.predicted(bnn, ONE, QUICK, str(file), slice(60))
    bnn.temperature, bnn.slope = 0.7, -0.2
    torch.testing.assert_close(found(), wanted())
    assert (bnn.temperature, bnn.slope) == (0.7, -0.2)
    bnn.noise = 0.9  # nothing is kept of that
    torch.testing.assert_close(found(), wanted())
    assert len(list((tmp_path / "cache").iterdir())) == (2 if part == slice(60) else 1)


# Tables


def judged(nll: float, auroc: float = 0.9, **more: float) -> dict[str, Any]:
    return {
        "nll": nll, "ece": 0.01, "accuracy": 0.93, "brier": 0.1, "draws": 24, "predict_ms": 2.0,
        "ood": {"svhn": {"auroc": auroc, "aupr": 0.5, "fpr95": 0.2}}, **more,
    }  # fmt: skip


def record(found: dict[str, Any]) -> dict[str, Any]:
    return {"found": found}


def headline_records(method: str = "ABNN", nll: float = 0.2) -> tables.Records:
    found: tables.Records = {}
    for seed, more in enumerate((-0.01, 0.0, 0.01)):
        fit = {"fit_seconds": 60.0, "megabytes": 1.5}
        found[Unit(NETWORK, method, seed, "fit")] = record(fit)
        found[Unit(NETWORK, method, seed, "train-only")] = record(judged(nll + more))
        for half, off in enumerate((-0.1, 0.1)):
            calibrated = judged(nll + off + more, calibrate_seconds=6.0)
            found[Unit(NETWORK, method, seed, f"calibrated-{half}")] = record(calibrated)
    return found


def test_rows_are_means_over_seeds_with_spread_and_both_ways_round() -> None:
    made = tables.tables(headline_records(), [])[f"headline-{NETWORK}"].splitlines()
    assert made[0].startswith("| ResNet-20 | NLL ↓ | ECE ↓ |")
    assert made[2].startswith("| ABNN, train only | 0.2000 ± 0.0100 | 0.0100 ± 0.0000 |")
    assert made[3].startswith("| ABNN, calibrated | 0.2000 ± 0.0100 |")
    assert made[2].endswith("| 60 | - | 2.0 ± 0.0 | 1.50 ± 0.00 | 24 |")
    assert "| 60 | 6 |" in made[3]
    assert len({line.count("|") for line in made}) == 1


def test_published_rows_stand_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "published_cifar10.csv").write_text(
        "checkpoint,method,nll,accuracy,ece,brier,auroc_svhn,fit_seconds_gpu\n"
        "resnet20,FMGP,0.25,0.9,0.01,0.1,0.88,900\nresnet56,ELLA,0.2,0.9,0.01,0.1,0.9,1000\n"
    )
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    made = tables.tables(headline_records(), tables.published())[f"headline-{NETWORK}"]
    assert "| *FMGP (published)* | 0.2500 | 0.0100 | 0.9000 | 0.1000 | 0.8800 |" in made
    assert "ELLA" not in made


def test_readme_has_every_method_as_fitted_and_the_best_of_the_others() -> None:
    def row(**measures: float) -> dict[str, Any]:
        auroc = measures.pop("auroc")
        return {"checkpoint": "resnet20", "method": "theirs", "ood": {"svhn": {"auroc": auroc}},
                "brier": 0.1, **measures}  # fmt: skip

    others = [
        row(nll=0.2, ece=0.02, accuracy=0.92, auroc=0.95),
        row(nll=0.3, ece=0.01, accuracy=0.94, auroc=0.91),
    ]
    made = tables.tables(headline_records("Mixture"), others)[f"digest-{NETWORK}"].splitlines()
    assert made[2].endswith("| 0.2000 ± 0.0100 | 0.0100 ± 0.0000 | 0.9000 ± 0.0000 | 3 |")
    assert made[3] == (
        "| *best published figure of each kind* | 0.9400 | 0.2000 | 0.0100 | 0.9500 | - |"
    )


def test_calibration_error_of_halves_is_pooled() -> None:
    """Each half has a gap, in opposite directions: together there is none."""
    half = {"nll": 0.1, "ood": {"svhn": {"auroc": 0.9}}, "predict_ms": None}
    gaps = ([[10.0], [8.0], [9.0]], [[10.0], [8.0], [7.0]])
    both = tables.both_ways([{**half, "bins": bins} for bins in gaps])
    floor = both.pop("ece_perfect")
    assert floor == pytest.approx(np.sqrt(2 / np.pi * 0.8 * 0.2 / 10))
    assert both == {"nll": 0.1, "ood": half["ood"], "ece_pooled": 0.0}
    assert "ece_pooled" not in tables.both_ways([half, half])


def test_published_rows_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    assert tables.published() == []
    assert "published_cifar10.csv is missing" in capsys.readouterr().err


def test_what_was_made_with_other_settings_is_in_no_table(tmp_path: Path) -> None:
    results = Results(tmp_path)
    fit, other = (Unit(NETWORK, "ABNN", 0, what) for what in ("fit", "train-only"))
    results.write(fit, {**record({}), "asked": units.asked(fit, QUICK)})
    results.write(other, {**record({}), "asked": units.asked(other, QUICK) | {"epochs": [7]}})
    assert list(tables.current(results, QUICK)) == [fit]


def test_bars_hold_where_they_do() -> None:
    rows = tables.headline({**headline_records(), **headline_records("Temperature", 0.3)}, NETWORK)
    line = bars.bars("ResNet-20", rows, NETWORK).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "ABNN", "0.2 ✓", "0.01 ✗", "0.01 ✗", "-", "0.93 ✓", "0.9 ✗", "24 ✓", "1 ✓",
        "1.1 ✓",
        "0.2 ✓", "0.9 ✗", "0.9 ✗", "✗",
    ]  # fmt: skip


def test_a_bar_that_was_not_measured_does_not_hold() -> None:
    alone = {"ABNN, train only": [judged(0.1, 0.99)]}
    line = bars.bars("ResNet-20", alone, NETWORK).splitlines()[2]
    assert line.endswith("| - | - | ✗ |")


def test_average_precision_pools_shards() -> None:
    def shard(clean: list[float], strange: list[float]) -> dict[str, Any]:
        both = {"clean": clean, "attacked": strange}
        return record({k: {"entropy": v, "epistemic": v, "right": 1} for k, v in both.items()})

    # Each shard alone is told apart without a mistake; together they are not.
    found = {
        Unit(NETWORK, "ABNN", 0, "pgd-0"): shard([0.1, 0.2], [0.3, 0.4]),
        Unit(NETWORK, "ABNN", 0, "pgd-1"): shard([0.5, 0.6], [0.7, 0.8]),
    }
    pooled = tables.attacked(found, NETWORK, "ABNN")
    assert pooled["ap_epistemic"] == pytest.approx((1 + 1 + 3 / 5 + 4 / 6) / 4)
    assert pooled["accuracy_pgd"] == 0.5


def test_page_has_a_place_for_every_table_and_filling_it_twice_changes_nothing(
    tmp_path: Path,
) -> None:
    page = tmp_path / "results.md"
    page.write_text(tables.DOCS.read_text() + tables.README.read_text())
    made = {**tables.tables(headline_records(), []), "plots": r"a \1 b"}
    markdown.fill(page, made)
    once = page.read_text()
    assert all(text in once for text in made.values())
    markdown.fill(page, made)
    assert page.read_text() == once
    with pytest.raises(ValueError, match="no place for 'other'"):
        markdown.fill(page, {"other": "text"})


def test_plots_show_what_was_measured(tmp_path: Path) -> None:
    assert plots.draw({}, tmp_path) == {}
    curve = {str(n): {"nll": 1 / n} for n in (16, 3, 6)}
    found = {Unit(NETWORK, "ABNN", 0, "draws"): record(curve)}
    assert plots.by_draws(found, "ABNN") == ([3, 6, 16], [1 / 3, 1 / 6, 1 / 16])
    assert list(plots.draw(found, tmp_path)) == ["quality-draws.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["quality-draws.png"]
