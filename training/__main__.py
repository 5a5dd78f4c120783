"""`accelerate launch -m tercet.training RECIPE` and `torchrun -m tercet.training RECIPE`: train, in every process."""

from tercet.cli import run_command

if __name__ == "__main__":
    run_command("train")
