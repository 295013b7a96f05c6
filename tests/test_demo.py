"""The demo, from end to end, once."""

import io
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

import bayesify
from bayesify import demo, trials
from bayesify.data import load_data
from bayesify.evaluation.comparison import Comparison
from bayesify.evaluation.verdict import judge
from bayesify.zoo import load_model
from conftest import heed_interrupts

METHODS = {"map", "temperature", "abnn", "bayes-adapter", "ibnn"}
FILES = {"report.html", "results.json", "results.csv", "gallery.png"}
Ran = tuple[Path, dict[str, Any], str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The folder that the demo wrote, its results and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "out"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "SHIFT_EXAMPLES", 20)  # most of its time goes into that curve
        found = demo.run(output, 0, Console(file=printed, width=80), progress=False)
        yield output, dict(found.results), printed.getvalue()


def numbers(content: Any) -> Iterator[float]:
    if isinstance(content, dict):
        for value in content.values():
            yield from numbers(value)
    elif isinstance(content, int | float):
        yield content


def test_it_writes_what_it_promises_and_nothing_else(ran: Ran) -> None:
    output, results, _ = ran
    assert {path.name for path in output.iterdir()} == {*METHODS, *FILES, "cache"}
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    gallery = (output / "gallery.png").read_bytes()
    assert gallery.startswith(b"\x89PNG")
    assert len(gallery) < 200_000


def test_the_report_is_of_this_run(ran: Ran) -> None:
    output, results, _ = ran
    page = (output / "report.html").read_text("utf-8")
    assert judge(results).headline in page.replace("&#39;", "'")
    assert "bayesify demo --seed 0" in page
    for method in results["methods"].values():
        assert f'data-value="{method["measures"]["nll"]["value"]}"' in page
    assert len(page) < 1_000_000


def test_its_numbers_are_finite_and_do_not_get_worse_where_they_must_not(ran: Ran) -> None:
    _, results, _ = ran
    methods = results["methods"]
    assert set(methods) == METHODS
    for method in methods.values():
        assert all(math.isfinite(number) for number in numbers(method["measures"]))
        assert set(method["ood"]) == {"rotated", "noise", "photos"}
        measures = {name: cell["value"] for name, cell in method["measures"].items()}
        network = {name: cell["value"] for name, cell in methods["map"]["measures"].items()}
        assert abs(measures["accuracy"] - network["accuracy"]) <= 0.01
        assert measures["nll"] <= network["nll"]
        # Confidence and accuracy cannot be this far apart at such a likelihood.
        assert measures["ece"] < 0.05


def test_settings_suit_the_network(ran: Ran) -> None:
    # Not kept "untrained" or as the "network": fitting helps on the validation digits.
    _, results, _ = ran
    for name in ("abnn", "bayes-adapter", "ibnn"):
        assert "(step " in results["methods"][name]["fit"]


def test_it_prints_its_numbers_and_where_the_report_is(ran: Ran) -> None:
    output, results, printed = ran
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines()[:-5]) <= 80
    for method in results["methods"].values():
        assert f"{method['measures']['nll']['value']:.4f}" in printed
        assert f"{method['ood']['photos']['auroc']['value']:.4f}" in printed
    said = " ".join(printed.split())
    assert all(sentence in said for sentence in judge(results).reasons)
    assert f" {output / 'report.html'} " in said
    assert "bayesify compare" in said


def test_intervals_are_printed_where_there_is_room(ran: Ran) -> None:
    _, results, printed = ran
    nll = results["methods"]["abnn"]["measures"]["nll"]
    interval = f"{nll['low']:.4f} to {nll['high']:.4f}"
    assert interval not in printed
    wide = io.StringIO()
    Console(file=wide, width=demo.WIDE).print(Comparison(results).table())
    assert interval in wide.getvalue()


def test_the_saved_network_gives_the_same_numbers_again(ran: Ran) -> None:
    output, results, _ = ran
    bnn = bayesify.load(output / "abnn", load_model("digits"))
    again = bnn.evaluate(DataLoader(load_data("digits:test"), batch_size=256))
    nll = results["methods"]["abnn"]["measures"]["nll"]["value"]
    assert again.nll == pytest.approx(nll, abs=1e-5)


def test_the_number_of_threads_is_as_before() -> None:
    before = torch.get_num_threads()
    with demo._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


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
        preexec_fn=heed_interrupts,  # noqa: PLW1509
    )
    try:
        until = time.monotonic() + 60
        while not (output / "map").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stderr.endswith("interrupted\n")
    # What was done is whole, for the next run to use; the rest is not there.
    assert {path.name for path in output.iterdir()} <= {"map", "cache"}
    for path in (output / "cache").iterdir():
        assert path.suffix == ".json"
        json.loads(path.read_text())
