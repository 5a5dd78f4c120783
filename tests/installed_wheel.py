"""The wheel in a virtual environment of its own, with the libraries of this one."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NOT_SOURCE = shutil.ignore_patterns(
    ".*", "out", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks"
)


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; fails with all that it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install_wheel(root: Path, folder: Path) -> Path:
    """Build the wheel of the checkout and install it into `folder`/venv, which is returned.

    Libraries are found by a path entry: they are not installed again.
    """
    source = folder / "source"  # a build leaves build/ and *.egg-info where it runs: not in the checkout
    shutil.copytree(root, source, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", source, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")

    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    python = venv / "bin" / "python"
    # Installed before the path entry is there: pip would find this environment's tercet and call it done.
    run(
        sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check",
        "install", "--no-deps", "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    site_packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    libraries = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    # A path entry does not run the .pth files of the folder it names, so the editable install there stays unseen.
    (site_packages / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries), encoding="utf-8")
    shutil.rmtree(source)
    return venv
