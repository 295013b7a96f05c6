"""The command line; see `benchmarks.quality`."""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import benchmarks.quality
from benchmarks.quality import extras, headline, peers, tables, transfer
from benchmarks.quality.provenance import machine
from benchmarks.quality.results import RESULTS, Results
from benchmarks.quality.settings import FULL, QUICK, Size
from benchmarks.quality.units import ATTACKS, CALIBRATED, Unit, asked, chosen, units

WORK: dict[str, Callable[[Unit, Size], dict[str, Any]]] = {
    "fit": headline.fit,
    "train-only": headline.train_only,
    **dict.fromkeys(CALIBRATED, headline.calibrated),
    "draws": extras.draws,
    "people": extras.people,
    "rotation": extras.rotation,
    "fgsm": extras.fgsm,
    "corruption": extras.corruption,
    **dict.fromkeys(ATTACKS, extras.pgd),
    "ablation": extras.ablation,
    "transfer": transfer.transfer,
    "peer": peers.peer,
}


def run(found: Sequence[Unit], size: Size, results: Results) -> int:
    """Runs what is not done, one unit after another; returns how many failed."""
    failed = 0
    for number, unit in enumerate(found, 1):
        settings = asked(unit, size)
        if results.state(unit, settings) == "done":
            continue
        print(f"[{number}/{len(found)}] {unit.name}", flush=True)
        started = time.monotonic()
        try:
            content = WORK[unit.what](unit, size)
        except Exception:  # one unit's failure is not the others'
            traceback.print_exc()
            failed += 1
            continue
        seconds = time.monotonic() - started
        results.write(
            unit, {"asked": settings, "seconds": seconds, "found": content, "made": machine()}
        )
        print(f"    {seconds:.0f} s", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=benchmarks.quality.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="on a few images, in minutes")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="PATTERN", help="some units"
    )
    parser.add_argument("--list", action="store_true", help="say which units are done")
    parser.add_argument("--table", action="store_true", help="write tables and plots only")
    given = parser.parse_args(arguments)
    size = QUICK if given.quick else FULL
    results = Results(RESULTS / size.folder)
    found = chosen(units(size), given.only)
    if not found:
        parser.error(f"--only {' '.join(given.only)} fits no unit; see --list.")
    if given.list:
        for unit in found:
            print(f"{results.state(unit, asked(unit, size)):6}{unit.name}")
        return 0
    failed = 0 if given.table else run(found, size, results)
    tables.write(results, size, in_docs=not given.quick)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
