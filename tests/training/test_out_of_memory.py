"""Out of memory is one line: what was asked for, and settings that need less and learn the same."""

import subprocess
import sys

import pytest
import torch

from tercet.training.out_of_memory import (
    OutOfMemoryError,
    describe_out_of_memory,
    explain_out_of_memory,
    fewer_rows,
)
from tercet.training.recipe import recipe_to_yaml

# As torch 2.13 words it.
ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 138.50 GiB memory in use."
)


@pytest.mark.parametrize(
    ("rows", "batches", "processes", "fewer"),
    [
        (32, [512], 1, 16),
        (32, [512], 8, 16),
        (12, [24], 1, 6),
        (10, [40], 4, 5),
        (10, [40], 8, 5),
        (9, [36], 4, 3),
        (16, [512, 48], 2, 8),
        (16, [512, 40], 2, 4),
        (7, [14], 2, 1),
        (1, [4], 1, 1),
    ],
)
def test_fewer_rows_still_divide_every_global_batch(rows, batches, processes, fewer):
    assert fewer_rows(rows, batches, processes) == fewer
    assert all(size % (fewer * processes) == 0 for size in batches)


def test_amounts_and_remedies_of_a_gpu(make_recipe):
    recipe = make_recipe(training={"global_batch_size": 64, "per_device_batch_size": 16})
    line = describe_out_of_memory(torch.OutOfMemoryError(ON_A_GPU), recipe, num_processes=2)
    assert "20.00 GiB were asked for, 1.20 GiB of 139.72 GiB were free, with 16 rows of 32 tokens" in line.replace(
        " with", ", with", 1
    )
    assert "--set training.per_device_batch_size=8 (the global batch stays 64)" in line
    assert "--set training.gradient_checkpointing=true" in line
    assert "--set training.sharding=full;" in line


def test_what_is_done_already_is_not_advised(make_recipe):
    recipe = make_recipe(
        training={
            "global_batch_size": 4, "per_device_batch_size": 1, "gradient_checkpointing": True, "sharding": "full",
        }
    )  # fmt: skip
    line = describe_out_of_memory(MemoryError(), recipe, num_processes=4)
    assert "--set" not in line
    assert "use more devices" in line
    assert "sharding=full on several devices" in describe_out_of_memory(MemoryError(), recipe, num_processes=1)


def test_a_real_refusal_of_the_allocator(make_recipe):
    """What torch says today, whatever its words, is taken for what it is."""
    with (
        pytest.raises(OutOfMemoryError, match=r"4194304\.00 GiB were asked for.*per_device_batch_size=1"),
        explain_out_of_memory(make_recipe(), 1),
    ):
        torch.empty(2**52, dtype=torch.uint8)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_what_the_driver_and_its_libraries_refuse_is_memory_too(make_recipe, words):
    """Pinned memory and workspaces, which PyTorch's own allocator has no part in and no error for."""
    with pytest.raises(OutOfMemoryError, match="per_device_batch_size=1"), explain_out_of_memory(make_recipe(), 1):
        raise RuntimeError(words)


def test_other_errors_stay_themselves(make_recipe):
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_out_of_memory(make_recipe(), 1):
        torch.ones(2, 3) @ torch.ones(2, 3)


LIMITED = """
import resource, sys
from tercet.cli import main
import torch, transformers, tercet.training.pipeline
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (600 << 20), resource.RLIM_INFINITY))
sys.argv[1:] = ["train", *sys.argv[1:]]
main()
"""


@pytest.mark.slow  # a run of its own
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory as Linux does")
def test_a_run_that_does_not_fit(make_recipe, tmp_path):
    """A limit that the step of so many rows exceeds; with the rows that the line names, the same command trains."""
    recipe = make_recipe(
        model={"hidden_size": 64, "hidden_dropout": 0.0},
        training={"global_batch_size": 4096, "per_device_batch_size": 4096, "num_steps": 1, "sequence_length": 64},
    )
    path = tmp_path / "r.yaml"
    path.write_text(recipe_to_yaml(recipe))
    command = [sys.executable, "-c", LIMITED, str(path), "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "out of memory" in done.stderr
    assert "GiB were asked for with 4,096 rows of 64 tokens" in done.stderr
    assert "--set training.per_device_batch_size=2048" in done.stderr
    assert "Traceback" not in done.stderr
    again = subprocess.run([*command, "--set", "training.per_device_batch_size=16"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
