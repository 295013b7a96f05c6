"""The JSON files: one a unit, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.quality.provenance import ROOT
from benchmarks.quality.units import Unit

RESULTS = ROOT / "benchmarks" / "results"


def write_json(path: Path, content: Any) -> None:
    """Writes beside its place and moves there: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


class Results:
    """What was found, by unit.

    Args:
        folder: Where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, unit: Unit) -> Path:
        return self.folder / unit.network / f"{unit.method}-seed{unit.seed}-{unit.what}.json"

    def state(self, unit: Unit, asked: dict[str, Any]) -> str:
        """done, open, or stale: made with other settings, which counts as open."""
        if not self.path(unit).exists():
            return "open"
        # As JSON has it, which knows no tuples.
        same = json.loads(self.path(unit).read_text())["asked"] == json.loads(json.dumps(asked))
        return "done" if same else "stale"

    def write(self, unit: Unit, record: dict[str, Any]) -> None:
        write_json(self.path(unit), {"unit": vars(unit), **record})

    def read(self) -> dict[Unit, dict[str, Any]]:
        """Every record there is."""
        records = [json.loads(path.read_text()) for path in sorted(self.folder.rglob("*.json"))]
        return {Unit(**record["unit"]): record for record in records}
