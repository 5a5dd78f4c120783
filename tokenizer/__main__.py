"""`python -m tercet.tokenizer train ...`: the same as `tercet tokenizer train ...`."""

from tercet.cli import run_command

if __name__ == "__main__":
    run_command("tokenizer")
