"""The rate that MFU is a share of."""

import json

import torch

from tercet.training.hardware import PeakRate
from tercet.training.pipeline import train

CPU = torch.device("cpu")


def test_a_peak_that_was_measured_too_low_is_raised():
    peak = PeakRate(CPU, 2, pause_s=0)
    assert peak.flops > 1e6
    peak.flops = 1.0  # as if the machine had been busy
    peak.measure_again()
    measured = peak.flops
    assert measured > 1e6
    assert peak.share(measured / 4) == 0.25
    assert peak.share(4 * measured) == 1.0
    assert peak.share(measured) == 0.25  # what the model reached is the peak from now on


def test_a_slow_moment_does_not_lower_the_peak():
    peak = PeakRate(CPU, pause_s=0)
    peak.flops = 1e30
    peak.measure_again()
    assert peak.flops == 1e30
    pausing = PeakRate(CPU, pause_s=1e9)
    pausing.flops = 1.0
    pausing.measure_again()
    assert pausing.flops == 1.0


def test_a_run_records_its_share_and_never_more_than_all(make_recipe, tmp_path):
    recipe = make_recipe(training={"num_steps": 4, "log_every": 1, "evaluate_every": 2, "save_every": 2})
    outcome = train(recipe, output_dir=tmp_path / "run", say=lambda line: None)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [record["mfu"] for record in records if "mfu" in record]
    assert len(shares) == 4
    assert all(0 <= share <= 1 for share in [*shares, outcome.results.training.mfu])
