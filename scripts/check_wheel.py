"""Check that the wheel is complete: install it in a fresh environment and run the demo there.

Usage: python scripts/check_wheel.py <folder with one wheel> <environment to make>
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check_contents(wheel: Path) -> None:
    """Stop if a file of the package is missing from the wheel, or it holds anything else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "bayesify"
    wanted = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if missing := sorted(wanted - names):
        sys.exit(f"{wheel.name} lacks {missing}")
    if foreign := sorted(name for name in names - wanted if ".dist-info/" not in name):
        sys.exit(f"{wheel.name} should not hold {foreign}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit(f"{wheel.name} lacks the licence")


def check_installed(wheel: Path, environment: Path) -> None:
    """Install the wheel in a new environment and use it from outside the source tree."""
    venv.create(environment, clear=True, with_pip=True)
    python = environment / "bin" / "python"
    quiet = ["-qq", "--disable-pip-version-check"]
    pip = [python, "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bayesify = environment / "bin" / "bayesify"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "demo"
        for arguments in (["--help"], ["demo", "--output", output]):
            subprocess.run([bayesify, *arguments], cwd=folder, env=outside, check=True)
        if not any(output.iterdir()):
            sys.exit(f"bayesify demo wrote nothing to {output}")


def main() -> None:
    """Check the one wheel of a folder."""
    folder, environment = Path(sys.argv[1]), Path(sys.argv[2])
    (wheel,) = folder.resolve().glob("*.whl")
    check_contents(wheel)
    check_installed(wheel, environment.resolve())
    print(f"{wheel.name}: complete, installs and runs")


if __name__ == "__main__":
    main()
