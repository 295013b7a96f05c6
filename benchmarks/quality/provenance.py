"""Who measured, when, with which code and on what machine."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import bayesify

ROOT = Path(__file__).parents[2]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """The commit, with a + if code that makes results was changed since."""
    git = shutil.which("git")
    if git is None:
        return "unknown"

    def ask(*arguments: str) -> str:
        return subprocess.run(
            [git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = ask("status", "--porcelain", "--", "src", "benchmarks/quality")
    return (ask("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def machine() -> dict[str, Any]:
    return {
        "commit": commit(),
        "finished": now(),
        "bayesify": bayesify.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "processor": platform.machine(),
    }
