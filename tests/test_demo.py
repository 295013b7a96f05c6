"""The demo, from end to end, once."""

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import bayesify
from bayesify import demo
from bayesify.evaluation.report import Detection, Report
from bayesify.zoo import load_model


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder that the demo wrote, what it returned and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "out"
    printed = io.StringIO()
    results = demo.run(output, 0, Console(file=printed, width=140), progress=False)
    return output, results, printed.getvalue()


def numbers(content: Any) -> Iterator[float]:
    if isinstance(content, dict):
        for value in content.values():
            yield from numbers(value)
    elif isinstance(content, int | float):
        yield content


def test_it_writes_what_it_promises_and_nothing_else(
    ran: tuple[Path, dict[str, Any], str],
) -> None:
    output, results, _ = ran
    pictures = {"reliability.png", "entropy.png", "gallery.png"}
    assert {p.name for p in output.iterdir()} == {*pictures, "results.json", "digits-abnn"}
    for name in pictures:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
        assert (output / name).stat().st_size < 200_000
    assert json.loads((output / "results.json").read_text()) == results


def test_its_numbers_are_finite_and_do_not_get_worse_where_they_must_not(
    ran: tuple[Path, dict[str, Any], str],
) -> None:
    _, results, _ = ran
    assert all(math.isfinite(number) for number in numbers(results))
    network, bnn = results["results"]["network"], results["results"]["ABNN"]
    assert abs(bnn["accuracy"] - network["accuracy"]) <= 0.01
    assert bnn["nll"] <= network["nll"]
    # Confidence and accuracy cannot be this far apart at such a likelihood.
    assert bnn["ece"] < 0.05
    assert set(bnn["ood"]) == {"rotated", "noise", "photos"}


def test_it_prints_its_numbers(ran: tuple[Path, dict[str, Any], str]) -> None:
    _, results, printed = ran
    for report in results["results"].values():
        assert f"{report['nll']:.4f}" in printed
        assert f"{report['ood']['photos']['auroc']:.3f}" in printed
    assert f"gets {results['confidence']['ABNN']['wrong']} wrong" in " ".join(printed.split())


def test_the_saved_network_gives_the_same_numbers_again(
    ran: tuple[Path, dict[str, Any], str],
) -> None:
    output, results, _ = ran
    bnn = bayesify.load(output / "digits-abnn", load_model("digits"))
    again = bnn.evaluate(demo._loader("digits:test"))
    assert again.nll == pytest.approx(results["results"]["ABNN"]["nll"], abs=1e-5)


def test_the_number_of_threads_is_as_before(ran: tuple[Path, dict[str, Any], str]) -> None:
    before = torch.get_num_threads()
    with demo._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def report(**changes: float) -> Report:
    values = {"nll": 0.5, "accuracy": 0.9, "ece": 0.1, "brier": 0.2} | changes
    found = {name: Detection(values.get(name, 0.8), 0.8, 0.2) for name in demo.STRANGE}
    measures = {name: values[name] for name in ("nll", "accuracy", "ece", "brier")}
    return Report(10, ood=found, **measures)


def test_the_verdict_says_where_it_is_not_better() -> None:
    worse = {"network": report(), "ABNN": report(nll=0.4, ece=0.3, rotated=0.7)}
    said = demo.verdict(worse)
    assert "in 5 of 7 measures" in said
    assert "ECE (0.3000 against 0.1000 of network)" in said
    assert "AUROC rotated (0.700 against 0.800 of network)" in said
    assert "NLL" not in said
    assert demo.verdict({"network": report(), "ABNN": report(nll=0.4)}).endswith("7 of 7 measures.")


def test_the_best_of_a_row_is_marked_and_ties_are_shared() -> None:
    reports = {"network": report(), "ABNN": report(nll=0.4)}
    assert demo.MEASURES[1].best(reports) == {"ABNN"}
    assert demo.MEASURES[0].best(reports) == {"network", "ABNN"}
    printed = io.StringIO()
    Console(file=printed, width=80).print(demo.table(reports))
    assert "0.4000*" in printed.getvalue()
    assert "…" not in printed.getvalue()


def test_shift_moves_by_one_pixel_at_most() -> None:
    images = torch.zeros(200, 2, 8, 8)
    images[:, :, 4, 4] = 1
    places = demo.shift(images)[:, 1].flatten(1).argmax(1)
    assert demo.shift(images).shape == images.shape
    assert {(p // 8, p % 8) for p in places.tolist()} == {
        (r, c) for r in (3, 4, 5) for c in (3, 4, 5)
    }


def test_ctrl_c_ends_with_130_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    code = "from bayesify.cli import main; main()"
    output = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "demo", "--output", str(output), "--no-progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "Making" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.endswith("interrupted\n")
    assert not output.exists()
