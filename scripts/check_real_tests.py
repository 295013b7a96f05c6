"""Stop unless the tests on real data ran, every file of them, and none was skipped.

A machine that has the data must not pass because a path was wrong and everything was skipped.
Usage: python scripts/check_real_tests.py <junit file written by pytest>
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

PREFIX = "test_real_"


def check(report: Path, tests: Path) -> list[str]:
    """Return what is wrong, one line each."""
    ran, problems = set(), []
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (pytest wrote it just now)
        # A module that skips itself has its path in the name, and an empty class name.
        where = f"{case.get('classname', '')}.{case.get('name', '')}"
        module = next((part for part in where.split(".") if part.startswith(PREFIX)), None)
        if module is None:
            continue
        skipped = case.find("skipped")
        # An expected failure is written as skipped too, but it did run.
        if skipped is not None and skipped.get("type") != "pytest.xfail":
            problems.append(f"{where} was skipped: {skipped.get('message')}")
        else:
            ran.add(module)
    files = {path.stem for path in tests.glob(f"{PREFIX}*.py")}
    problems += [f"no test of {name}.py ran" for name in sorted(files - ran)]
    if not files:
        problems.append(f"there is no {tests}/{PREFIX}*.py")
    return problems


def main() -> None:
    """Check the report named on the command line against the tests of this repository."""
    problems = check(Path(sys.argv[1]), Path(__file__).resolve().parent.parent / "tests")
    if problems:
        sys.exit("\n".join(["The real data is there, and was not tested:", *problems]))


if __name__ == "__main__":
    main()
