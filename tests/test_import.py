"""Importing bayesify is cheap, and arrows point upwards only."""

import ast
import subprocess
import sys
from pathlib import Path

import bayesify

HEAVY = [
    "matplotlib", "torchmetrics", "accelerate", "sklearn", "scipy", "pandas", "typer", "rich",
    "timm", "torchvision", "transformers", "PIL", "laplace",
]  # fmt: skip

# What stands higher never imports what stands lower, at the top of a file.
ORDER = [
    "errors", "files", "heap", "memory", "sites", "replicas", "rows", "operations", "gates",
    "posterior",
    "methods.method", "methods.abnn", "methods.bayes_adapter", "methods.ibnn",
    "methods.network", "methods.mean_field_vi", "methods.dropout", "methods.augmentation",
    "methods.ensemble", "methods.swag", "methods.curvature", "methods.laplace",
    "methods.mixture", "methods",
    "batches", "likelihood",
    "tape.kernels", "tape.steps", "tape.passes", "tape.playing", "tape.cutting", "tape.recording",
    "tape",
    "sampling", "plan", "prediction", "adaptive", "augmentation", "mirror", "validation",
    "calibration", "ending", "outliers", "trunk", "gradients", "features", "checkpoint",
    "fit_result", "training", "mixing", "choice",
    "model",
    "choosing",
    "evaluation", "evaluation.checks", "evaluation.ranking", "evaluation.calibration",
    "evaluation.classification", "evaluation.detection", "evaluation.selective",
    "evaluation.regression", "evaluation.segmentation", "evaluation.diversity",
    "evaluation.bootstrap",
    "evaluation.metrics", "evaluation.averages", "evaluation.ranked", "evaluation.streaming",
    "evaluation.tally",
    "evaluation.pixels", "evaluation.attacks", "evaluation.report", "evaluation.shifts",
    "evaluation.landscape", "evaluation.plots", "evaluation.moments", "evaluation.panels",
    "evaluation.contract", "evaluation.verdict", "evaluation.page",
    "evaluation.answers", "evaluation.comparison",
    "io", "identity", "trials", "compare", "zoo", "data", "table", "demo",
    "cli.interrupts", "cli.options", "cli.printing", "cli.arguments", "cli",
]  # fmt: skip


def test_importing_loads_nothing_heavy() -> None:
    code = f"""
import sys
import bayesify
loaded = [name for name in {HEAVY} if name in sys.modules]
import torch
assert not torch.cuda.is_initialized()
sys.exit(", ".join(loaded) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist() -> None:
    assert all(hasattr(bayesify, name) for name in bayesify.__all__)


def test_arrows_point_upwards() -> None:
    root = Path(bayesify.__file__).parent
    for file in root.rglob("*.py"):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if name == "__init__" or name.startswith("data"):
            continue
        assert name in ORDER, f"{name} has no place in the order"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayesify"):
                other = node.module.removeprefix("bayesify").lstrip(".")
                parts = [other] if other else [alias.name for alias in node.names]
                parts = [part for part in parts if part != "__version__"]
                for part in parts:
                    place = part if part in ORDER else part.split(".")[0]
                    assert ORDER.index(place) < ORDER.index(name), f"{name} imports {part}"
