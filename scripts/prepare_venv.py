"""Install `venv_site/` into the virtual environment that runs this, if its torch has no CUDA."""

import shutil
import sysconfig
from pathlib import Path

import torch

MODULE = "torchvision_on_cpu"


def main() -> None:
    """Copy the import hook, or remove it if torch is no longer a CPU build."""
    site = Path(sysconfig.get_path("purelib"))
    hook, start = site / f"{MODULE}.py", site / f"{MODULE}.pth"
    if torch.version.cuda is None:
        shutil.copyfile(Path(__file__).parent / "venv_site" / hook.name, hook)
        start.write_text(f"import {MODULE}\n")
    else:
        start.unlink(missing_ok=True)
        hook.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
