"""What a run shows while it goes on, where there is no terminal."""

import re

from resumed_runs import assert_same_run, silently

from tercet.training.pipeline import train
from tercet.training.progress import MetricsFile


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
