"""How this command was called, so that lines to type next can be typed."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """`tercet`; or a path to it, or to Python and `-m tercet`, where the shell would not find it by its name."""
    called = Path(sys.argv[0])
    if called.name.removesuffix(".exe") == "tercet":
        found = shutil.which("tercet")
        if called.parent == Path() or (found is not None and Path(found).samefile(called)):
            return "tercet"
        return shlex.quote(_from_here(called))
    return f"{shlex.quote(_from_here(Path(sys.executable)))} -m tercet"


def _from_here(path: Path) -> str:
    """The shorter way to a file that is below the working directory, whose links stay as they are."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
