"""What a run shows while it goes on, where there is no terminal."""

import re
from types import SimpleNamespace

import pytest
from resumed_runs import assert_same_run, silently

from tercet.training.pipeline import train
from tercet.training.progress import MetricsFile, opening_lines


def test_lines_and_samples(make_recipe, tmp_path, untouched, capsys):
    """Samples on the way draw random numbers of their own: the run ends with the same bits."""
    train(make_recipe(training={"sample_every": 4}), output_dir=tmp_path / "run", say=silently)
    assert_same_run(tmp_path / "run", untouched)
    said = capsys.readouterr().out
    assert len(re.findall(r"step +[48]   '(The)", said)) == 2
    logged = re.findall(
        r"step +(\d)/8   loss \d\.\d{3}  tok/s [\d,]+  mfu \d+%  grad \d+\.\d\d  lr (\S+)(  left \d\d:\d\d)?$",
        said,
        re.M,
    )
    assert [int(step) for step, *_ in logged] == list(range(1, 9))
    # How long it takes is said when it is known.
    assert [bool(left) for *_, left in logged] == [False] * 5 + [True] * 3
    assert float(logged[2][1]) == 5e-3


def test_records_after_a_checkpoint_are_forgotten(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        metrics.append({"step": step, "loss_nats": 1 / 3 / step})
    with metrics.path.open("a") as file:
        file.write('{"step": 6, "lo')  # torn by a kill
    before = metrics.path.read_text().splitlines()
    metrics.drop_after(3)
    assert metrics.path.read_text().splitlines() == before[:3]
    assert metrics.records()[2]["loss_nats"] == 1 / 3 / 3


@pytest.mark.parametrize(
    ("training", "num_processes", "precision", "machine", "batch"),
    [
        ({}, 2, "no", "2 processes on cpu, weights in every process (DDP), float32",
         "12 rows of 32 tokens, 384 a step: 2 rows x 3 accumulated x 2 processes"),
        ({"sharding": "full"}, 6, "bf16", "6 processes on cpu, weights sharded (FSDP2), bfloat16",
         "12 rows of 32 tokens, 384 a step: 2 rows x 1 accumulated x 6 processes"),
        ({"sharding": "full"}, 1, "no", "1 process on cpu, no sharding: one process, float32",
         "12 rows of 32 tokens, 384 a step: 2 rows x 6 accumulated"),
        ({"per_device_batch_size": 12}, 1, "no", "1 process on cpu, float32", "12 rows of 32 tokens, 384 a step"),
    ],
)  # fmt: skip
def test_the_lines_that_a_run_opens_with(make_recipe, training, num_processes, precision, machine, batch):
    accelerator = SimpleNamespace(
        num_processes=num_processes, device=SimpleNamespace(type="cpu"), mixed_precision=precision
    )
    recipe = make_recipe(training={"global_batch_size": 12, "num_steps": 9, **training})
    lines = opening_lines(recipe, accelerator, "5 rows an epoch", 4)  # type: ignore[arg-type]
    assert lines == [
        f"Machine    {machine}",
        f"Batch      {batch}",
        "Training   9 steps, going on from step 4; 5 rows an epoch",
    ]
