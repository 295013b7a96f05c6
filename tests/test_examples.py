import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def cubic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cubic", EXAMPLES / "cubic_regression.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cubic_regression_writes_results_table_and_figure(
    cubic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--layers", "1", "--seeds", "0", "--steps", "150", "--width", "32"]
    asked += ["--folder", str(tmp_path)]
    cubic.main(asked)
    file = tmp_path / "benchmarks/results/cubic_regression.json"
    runs = json.loads(file.read_text())["runs"]
    assert [row["method"] for row in runs] == list(cubic.METHODS)
    _, y = cubic.draw_points(0)
    constant = (cubic.GRID**3 - y.mean())[cubic.GRID.abs() <= cubic.EDGE].square().mean().sqrt()
    assert runs[0]["rmse"] < 0.7 * constant  # iBNN has begun to follow the cubic
    assert runs[0]["epistemic_std_outside"] > runs[0]["epistemic_std"] > 0
    assert "| iBNN | 1 |" in capsys.readouterr().out
    assert (tmp_path / "docs/images/cubic_regression.png").stat().st_size > 10_000

    before = file.read_text()
    cubic.main(asked)  # all is done already
    assert file.read_text() == before
    with pytest.raises(SystemExit, match="other settings"):
        cubic.main([*asked, "--steps", "151"])


def test_the_points_are_those_of_the_seed(cubic: ModuleType) -> None:
    x, y = cubic.draw_points(0)
    assert torch.equal(x, cubic.draw_points(0)[0])
    assert not torch.equal(x, cubic.draw_points(1)[0])
    assert x.abs().max() <= 4
    assert 1.5 < (y - x**3).std() < 4.5  # 3, within four standard errors
