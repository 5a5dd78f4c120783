"""The benchmark of training steps runs, and its contenders train on the same text."""

import json
import subprocess
import sys

import pytest

NAMES = ["tercet", "llama", "trainer", "tercet-muon"]


@pytest.fixture(scope="module")
def smoke(root, tmp_path_factory):
    """What a run of a few rounds of a very small model writes and prints."""
    file = tmp_path_factory.mktemp("train") / "train.json"
    command = [sys.executable, str(root / "benchmarks" / "train.py"), "--sections", "smoke", "--seconds", "0"]
    chosen = ["--threads", "1", "--json", str(file), "--contenders", *NAMES]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_every_contender_has_its_line_and_its_record(smoke):
    record, printed = smoke
    rows = record["smoke"]
    assert [name for name in rows if name != "machine"] == NAMES
    assert rows["llama"]["ratio"] == 1.0
    assert all(rows[name]["tokens_per_second"] > 0 and rows[name]["peak_bytes"] > 0 for name in NAMES)
    assert len([line for line in printed.splitlines() if line.startswith("| ")]) == 1 + len(NAMES)
    assert "--sections smoke" in record["command"]


@pytest.mark.slow
def test_tercet_and_the_plain_loop_train_alike(tmp_path):
    """The same loss at the first step and nearly the same after some: speed is not bought with learning."""
    from train import SMOKE, prepare_text
    from train_contenders import Contender

    data = prepare_text(tmp_path / "data", SMOKE)
    losses = {}
    for name in ("tercet", "llama"):
        contender = Contender(name, SMOKE, data, 1)
        losses[name] = [contender.step()[1] for _ in range(30)]
        contender.close()
    for own, plain in zip(losses["tercet"], losses["llama"], strict=True):
        assert own == pytest.approx(plain, rel=0.06)
    assert losses["tercet"][-1] < losses["tercet"][0] - 0.3
