"""`python -m tercet.hub push CHECKPOINT REPO` and `python -m tercet.hub card CHECKPOINT`, as `tercet` runs them.

Without a command's name, the arguments are those of `card`.
"""

import sys

from tercet.cli import run_command

if __name__ == "__main__":
    command = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in ("card", "push") else "card"
    run_command(command)
