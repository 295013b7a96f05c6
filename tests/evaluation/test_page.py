"""The report: what is on it, that nothing hostile gets in, and that it works in a browser."""

import copy
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from comparisons import CLASSES, make_results
from typer.testing import CliRunner

from bayesify.cli import app
from bayesify.errors import CorruptFileError
from bayesify.evaluation import panels
from bayesify.evaluation.page import check, render, write_report
from bayesify.evaluation.verdict import duration, judge, size

HOSTILE = "<script>alert(1)</script>\"'&$x_1$"
SECTIONS = ["measures", "reliability", "entropy", "risk-coverage", "shift", "classes", "gallery"]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    results = make_results(resamples=20)
    names = ("map", "temperature", "abnn", "ibnn")
    return {**results, "methods": {name: results["methods"][name] for name in names}}


@pytest.fixture(scope="module")
def page(whole: dict[str, Any]) -> str:
    return render(whole)


@pytest.fixture
def results(whole: dict[str, Any]) -> dict[str, Any]:
    """A small one to break: the network and one method."""
    part = {**whole, "methods": {name: whole["methods"][name] for name in ("map", "abnn")}}
    return copy.deepcopy(part)


@pytest.fixture
def bare(results: dict[str, Any]) -> dict[str, Any]:
    """One without curves, which is quick to render."""
    for method in results["methods"].values():
        del method["curves"]
    return results


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="([\w-]+)"', text)


def set_better(method: dict[str, Any], better: bool | None) -> None:
    for measures in (method["measures"], *method["ood"].values()):
        for measure in measures.values():
            measure["better"] = better


# What is on it


def test_all_parts_are_there(page: str, whole: dict[str, Any]) -> None:
    assert sections(page) == [*SECTIONS, "made"]
    assert page.count("<svg") == 3 + 4 + 1 + 4 + 1
    assert page.count("<figcaption>") == 5
    assert page.count("<img ") == 5 * 8
    assert whole["command"] in page
    assert judge(whole).headline in page.replace("&#39;", "'")
    for method in whole["methods"].values():
        assert f'<th scope="row" data-value="{method["title"]}">' in page
    for name in CLASSES:
        assert f'data-value="{name}"' in page


def test_numbers_are_those_of_the_results(page: str, whole: dict[str, Any]) -> None:
    nll = whole["methods"]["abnn"]["measures"]["nll"]
    row = page[page.index('data-value="ABNN"') :]
    row = row[: row.index("</tr>")]
    assert f'data-value="{nll["value"]}"' in row
    assert f"{nll['value']:.3f}" in row
    assert f"{nll['low']:.3f} to {nll['high']:.3f}" in row
    assert "8.30 \u00d7" in row
    assert "22.4 kB" in row


def test_differences_within_noise_are_marked(bare: dict[str, Any]) -> None:
    for better, mark in ((True, "▲"), (False, "▼"), (None, "≈")):
        set_better(bare["methods"]["abnn"], better)
        text = render(bare)
        body = text[text.index("<tbody>") : text.index("</tbody>")]
        assert set(re.findall("[▲▼≈]", body)) == {mark}


def test_more_measures_stand_in_tables_of_their_own(bare: dict[str, Any]) -> None:
    def tables() -> list[str]:
        return re.findall(r"<table.*?</table>", render(bare), re.DOTALL)

    before = tables()
    for method in bare["methods"].values():
        bounds = {"low": None, "high": None, "better": None}
        for name in ("classwise_ece", "mistakes_auroc"):
            method["measures"][name] = {"value": 0.0123, **bounds}
        method["measures"]["mistakes_aupr"] = {"value": None, **bounds}
        for found in method["ood"].values():
            found["aupr_inside"] = found["auroc"]
    main, quality, mistakes, strange = tables()[:4]
    assert main == before[0]
    assert "classwise ECE ↓" in quality
    assert "AUPR inside ↑" in strange
    # Without an interval nothing is said to be better, worse or the same.
    assert mistakes.count('<span class="set">mistakes</span>') == 2
    assert mistakes.count("0.012<") == len(bare["methods"])
    assert not re.search("[▲▼≈]", mistakes)


def test_plots_have_axes_and_units(page: str) -> None:
    for label in (
        "confidence (%)",
        "right answers (%)",
        "predictive entropy (nats)",
        "inputs (%)",
        "answered, the surest first (%)",
        "wrong among the answered (%)",
        "mean entropy (nats)",
        "gaussian: share of noise",
    ):
        assert f">{label}</text>" in page


def test_ids_are_unique_and_found(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page))
    assert used
    assert {one or other for one, other in used} <= set(ids)


def test_what_is_missing_is_left_out(results: dict[str, Any]) -> None:
    for method in results["methods"].values():
        method["curves"]["shift"] = None
        del method["curves"]["entropy"]
        method["ood"] = {}
        method["per_class"] = []
        method["examples"] = {}
    results["data"]["ood"] = {}
    results["classes"] = None
    text = render(results)
    assert sections(text) == ["measures", "reliability", "risk-coverage", "made"]
    assert "Other data" not in text


def test_regression_has_its_own_measures(results: dict[str, Any]) -> None:
    for name, method in results["methods"].items():
        value = {"value": 2.5, "low": 2.0, "high": 3.0, "better": None if name == "map" else True}
        results["methods"][name] = {
            "title": method["title"],
            "measures": {"rmse": value, "nll": value, "coverage_90": value},
        }
    text = render(results)
    assert sections(text) == ["measures", "made"]
    assert "RMSE" in text
    assert "coverage 90" in text
    assert "Use ABNN" in text


def test_the_network_alone_has_a_report(results: dict[str, Any]) -> None:
    del results["methods"]["abnn"]
    text = render(results)
    assert "Only the network itself" in text
    assert sections(text) == [*SECTIONS, "made"]


@pytest.mark.parametrize(
    "path",
    [
        "network",
        "data",
        "data.test",
        "seed",
        "command",
        "bayesify",
        "classes",
        "methods.abnn.cost",
        "methods.abnn.settings",
        "methods.abnn.per_class",
        "methods.abnn.examples",
        "methods.abnn.measures.nll.low",
        "methods.map.measures.nll",
    ],
)
def test_the_rest_is_shown_where_a_part_is_missing(bare: dict[str, Any], path: str) -> None:
    assert "How this was made" in render(broken(copy.deepcopy(bare), path, KeyError))
    if path != "methods.map.measures.nll":
        assert "How this was made" in render(broken(bare, path, None))


def test_a_curve_without_other_data_is_drawn(results: dict[str, Any]) -> None:
    for method in results["methods"].values():
        method["curves"] = {"entropy": method["curves"]["entropy"]}
        del method["curves"]["entropy"]["ood"]
    assert render(results).count("<svg") == 2


def test_doubt_is_shown_of_a_method_that_has_some(whole: dict[str, Any]) -> None:
    names = ("map", "temperature", "abnn")
    part = copy.deepcopy({**whole, "methods": {name: whole["methods"][name] for name in names}})
    for method in part["methods"].values():
        del method["curves"]
    assert judge(check(part)).chosen == "temperature"
    assert "ABNN doubts itself most here" in render(part)
    for tile in part["methods"]["abnn"]["examples"]["most_epistemic"]:
        tile["epistemic"] = 0.0
    assert "doubts itself most" not in render(part)


def test_the_baseline_is_called_the_network(bare: dict[str, Any]) -> None:
    bare["methods"]["map"]["title"] = "MAP"
    assert "Network (MAP)" in render(bare)


def test_numbers_that_are_not_finite_are_dashes(results: dict[str, Any]) -> None:
    results["methods"]["abnn"]["measures"]["nll"]["value"] = math.nan
    results["methods"]["abnn"]["cost"]["peak_bytes"] = None
    results["methods"]["abnn"]["curves"]["risk_coverage"]["risk"][3] = math.nan
    text = render(results)
    assert "nan" not in re.sub(r"<svg.*?</svg>|data:[^\"]*", "", text, flags=re.DOTALL).lower()
    assert "\u2013" in text


# Nothing hostile


def test_what_users_named_is_escaped(results: dict[str, Any]) -> None:
    results["classes"] = [HOSTILE] * len(CLASSES)
    results["command"] = results["bayesify"] = results["network"]["class"] = HOSTILE
    results["data"] = {"test": {"name": HOSTILE, "examples": 5}, "ood": {HOSTILE: 5}}
    for name in ("map", "abnn"):
        method = results["methods"][name]
        method["title"] = f"_{HOSTILE}{name}"
        method["settings"] = {HOSTILE: HOSTILE}
        method["fit"] = HOSTILE
        method["ood"] = {HOSTILE: method["ood"]["svhn"]}
        method["measures"][HOSTILE] = method["measures"]["nll"]
        method["curves"]["entropy"]["ood"] = {HOSTILE: method["curves"]["entropy"]["test"]}
        method["curves"]["shift"]["kind"] = HOSTILE
        for tile in (tile for tiles in method["examples"].values() for tile in tiles):
            tile["set"] = HOSTILE
    text = render(results)
    assert text.count("<script>") == 1
    assert "alert(1)</script>" not in text
    assert "&lt;script&gt;" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(svg)  # noqa: S314
        assert not root.findall(".//script")


@pytest.mark.parametrize(
    "image",
    [
        "https://example.org/spy.png",
        "data:image/svg+xml;base64,AAAA",
        'data:image/png;base64,AAAA" onerror="alert(1)',
        "data:image/png;base64,AAAA\n",
        "javascript:alert(1)",
    ],
)
def test_only_png_data_is_shown(bare: dict[str, Any], image: str) -> None:
    for method in bare["methods"].values():
        for tile in (tile for tiles in method["examples"].values() for tile in tiles):
            tile["image"] = image
    text = render(bare)
    assert "<img" not in text
    assert image.strip() not in text
    assert 'class="blank"' in text


def test_the_page_needs_nothing_else(page: str) -> None:
    assert "http://" not in page
    assert "https://" not in page
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', page)
    assert "@import" not in page
    assert "default-src 'none'" in page


# Errors


def broken(results: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *folders, last = path.split(".")
    place = results
    for folder in folders:
        place = place[folder]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return results


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "format 2 .*Update bayesify"),
        ("format", KeyError, "format None"),
        ("methods", KeyError, "must be an object with 'methods'.*bayesify compare"),
        ("methods", [], "results.methods must be an object"),
        ("methods", {}, "baseline 'map' is not one of the methods"),
        ("methods.abnn.title", 3, "methods.abnn.title must be of type str, not 3"),
        ("methods.abnn.measures.nll", 0.3, "measures.nll must be an object, not 0.3"),
        ("methods.abnn.measures.nll.value", "0.3", "must be of type float or int, not '0.3'"),
        ("methods.abnn.measures.nll.better", "yes", "better must be of type bool"),
        ("methods.abnn.curves.reliability.count", KeyError, "'count'.*bayesify compare"),
        ("methods.abnn.curves.reliability.count", [1], "differ in length"),
        ("methods.abnn.curves.entropy.edges", [0.0], "differ in length"),
        ("methods.abnn.curves.risk_coverage.risk", [2.0] * 150, "risk must be in 0 to 1"),
        ("methods.abnn.per_class", [1], r"per_class\[0\] must be an object"),
        ("methods.abnn.draws", True, "draws must be of type int, not True"),
        ("classes", "cat", "results.classes must be a list"),
    ],
)
def test_malformed_results_are_named(
    results: dict[str, Any], path: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFileError, match=message):
        write_report(broken(results, path, value), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("results", [None, [], 3, "results"])
def test_what_is_no_object_is_refused(results: Any) -> None:
    with pytest.raises(CorruptFileError, match="results must be an object.*bayesify compare"):
        check(results)


# The verdict


def test_the_best_likelihood_is_advised(results: dict[str, Any]) -> None:
    set_better(results["methods"]["abnn"], True)
    verdict = judge(check(results))
    assert verdict.chosen == "abnn"
    assert verdict.headline.startswith("Use ABNN")
    text = " ".join(verdict.reasons)
    nll = results["methods"]["map"]["measures"]["nll"]["value"]
    assert f"NLL {nll:.3f} → " in text
    assert "8.3 times the network's time" in text
    assert "(better)" in text


def test_a_method_that_draws_nothing_any_more_is_said_to(results: dict[str, Any]) -> None:
    method = results["methods"]["abnn"]
    set_better(method, True)
    assert "noise" not in " ".join(judge(check(results)).reasons).replace("within noise", "")
    method["noise"] = 0.0
    assert "set the noise of ABNN to 0" in " ".join(judge(check(results)).reasons)


def test_nothing_is_advised_where_nothing_helps(results: dict[str, Any]) -> None:
    set_better(results["methods"]["abnn"], None)
    verdict = judge(check(results))
    assert verdict.chosen is None
    assert verdict.headline.startswith("Keep the network as it is")
    assert "(within noise)" in " ".join(verdict.reasons)
    assert "(better)" not in " ".join(verdict.reasons)


def test_better_detection_alone_is_named_as_such(results: dict[str, Any]) -> None:
    method = results["methods"]["abnn"]
    set_better(method, None)
    method["ood"]["svhn"]["auroc"]["better"] = True
    verdict = judge(check(results))
    assert verdict.chosen == "abnn"
    assert "No method improves the likelihood" in verdict.headline
    method["measures"]["nll"]["better"] = False
    assert judge(check(results)).chosen is None


def test_a_cheaper_method_as_good_is_mentioned(results: dict[str, Any]) -> None:
    methods = results["methods"]
    set_better(methods["abnn"], True)
    methods["cheap"] = copy.deepcopy(methods["abnn"]) | {"title": "Cheap"}
    methods["cheap"]["measures"]["nll"]["value"] += 1e-3
    methods["cheap"]["cost"]["relative_time"] = 1.0
    verdict = judge(check(results))
    assert verdict.chosen == "abnn"
    assert "Cheaper: Cheap, at 1.0 times" in verdict.reasons[-1]


def test_the_networks_confidence_is_judged(results: dict[str, Any]) -> None:
    curve = {"confidence": [0.9], "accuracy": [0.7], "count": [1000]}
    results["methods"]["map"]["curves"]["reliability"] = curve
    assert "too sure by 20.0 points" in judge(check(results)).reasons[0]
    curve["accuracy"] = [0.89]
    assert "about as sure as it is right" in judge(check(results)).reasons[0]
    curve["confidence"] = [0.5]
    assert "not sure enough by 39.0 points" in judge(check(results)).reasons[0]


def test_times_and_sizes_can_be_read() -> None:
    assert [duration(s) for s in (0.42, 42, 600, 7200)] == ["0.4 s", "42 s", "10 min", "2.0 h"]
    assert [size(b) for b in (24, 22_400, 2_180_000, 3e9)] == ["24 B", "22.4 kB", "2.18 MB", "3 GB"]


# Figures


def test_figures_show_the_curves(whole: dict[str, Any]) -> None:
    curves = whole["methods"]["abnn"]["curves"]
    (axes,) = panels.risk_coverage({"mine": curves["risk_coverage"]}).axes
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(100 * curves["risk_coverage"]["risk"][-1])
    (axes,) = panels.shift_entropy("mine", curves["shift"]).axes
    assert list(axes.lines[0].get_ydata()) == curves["shift"]["entropy"]
    (axes,) = panels.reliability(
        "mine", {"confidence": [0.9], "accuracy": [0.5], "count": [4]}
    ).axes
    assert not axes.collections  # too few answers to have an accuracy


# The command


def test_the_command_writes_the_page(bare: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(bare))
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").read_text("utf-8") == render(bare)
    other = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(app, ["report", str(file), "--output", str(other)]).exit_code == 0
    assert other.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("{}", "format None"),
        ("[]", "must be an object"),
    ],
)
def test_the_command_says_what_is_wrong(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text)
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output


# In a browser


def browse(file: Path, profile: Path) -> tuple[str, str]:
    """The page after its scripts have run, and what the browser had to say."""
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_it_renders_without_console_errors(page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, "utf-8")
    text, said = browse(file, tmp_path / "profile")
    assert said == ""
    assert text.count("<svg") == page.count("<svg")
    # The policy holds: a script that is not the page's own does not run, and the browser says so.
    file.write_text(page.replace("</body>", "<script>document.title = 'mine'</script></body>"))
    text, said = browse(file, tmp_path / "profile")
    assert "<title>mine" not in text
    assert "Content Security Policy" in said


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_tables_can_be_sorted(page: str, whole: dict[str, Any], tmp_path: Path) -> None:
    # A copy without the policy, so that the test's own script may press the headings.
    free = re.sub(r"<meta http-equiv[^>]*>", "", page)
    script = """
      const table = document.querySelector("table.sortable");
      const seen = [2, 2, 0].map((column) => {
        table.querySelectorAll("thead button")[column].click();
        return [[...table.tBodies[0].rows].map((row) => row.cells[0].dataset.value),
                [...table.querySelectorAll("[aria-sort]")].map((th) => th.ariaSort)];
      });
      document.title = JSON.stringify(seen);
    """
    file = tmp_path / "report.html"
    file.write_text(free.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    text, said = browse(file, tmp_path / "profile")
    assert said == ""
    methods = sorted(whole["methods"].values(), key=lambda one: one["measures"]["nll"]["value"])
    rising = [method["title"] for method in methods]
    assert json.loads(re.findall("<title>(.*?)</title>", text)[0]) == [
        [rising, ["ascending"]],
        [rising[::-1], ["descending"]],
        [sorted(rising, key=str.lower), ["ascending"]],
    ]
