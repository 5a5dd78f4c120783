"""transformers' own tests of causal language models, where its test tree is at hand: see `run_hf_suite.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(
    not (os.environ.get("HF_TREE") and os.environ.get("HF_SUITE")),
    reason="HF_TREE (transformers' tests) and HF_SUITE (the harness) are not set",
)
def test_tercet_fails_nothing_and_runs_all_that_llama_runs():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_hf_suite.py"))], capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
