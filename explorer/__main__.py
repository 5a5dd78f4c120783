"""`python -m tercet.explorer CHECKPOINT`: the same as `tercet explore CHECKPOINT`."""

from tercet.cli import run_command

if __name__ == "__main__":
    run_command("explore")
