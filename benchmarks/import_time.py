"""How much longer `import bayesify` takes than `import torch`, in fresh processes, interleaved.

    python benchmarks/import_time.py [--repeats 15]

Writes benchmarks/results/import_time.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "import_time.json"


def seconds(module: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {"torch": [], "bayesify": []}
    for module in times:  # once for the page cache
        seconds(module)
    for _ in range(repeats):
        for module, measured in times.items():
            measured.append(seconds(module))
    extra = [b - t for t, b in zip(times["torch"], times["bayesify"], strict=True)]
    results = {
        "command": "python benchmarks/import_time.py",
        "repeats": repeats,
        "torch_seconds": statistics.median(times["torch"]),
        "bayesify_seconds": statistics.median(times["bayesify"]),
        "extra_seconds": statistics.median(extra),
        "extra_seconds_quartiles": statistics.quantiles(extra, n=4),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
