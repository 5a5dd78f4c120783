"""`python -m tercet.hub CHECKPOINT`: the same as `tercet card CHECKPOINT`."""

from tercet.cli import run_command

if __name__ == "__main__":
    run_command("card")
