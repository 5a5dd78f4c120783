"""The memory of a step as it is estimated on fake tensors, against the same step on real ones."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tercet.training.memory import MemoryMeter, make_step_model, run_step, step_memory
from tercet.training.optimizers import optimizers_of_recipe

LARGER = {"model": {"hidden_size": 64, "num_hidden_layers": 3, "hidden_dropout": 0.0}, "tokenizer": {"vocab_size": 512}}
SHAPES = {
    "plain": {"sequence_length": 128, "global_batch_size": 8, "per_device_batch_size": 8},
    "accumulated": {"sequence_length": 128, "global_batch_size": 8, "per_device_batch_size": 4},
    "recomputed": {"sequence_length": 128, "global_batch_size": 8, "per_device_batch_size": 8,
                   "gradient_checkpointing": True},
}  # fmt: skip


def real_step(recipe, config) -> tuple[dict[str, int], int, int]:
    """What the meter sees of a real second step, by part; bytes of weights and of the optimizers' states."""
    training = recipe.training
    shape = (training.per_device_batch_size, training.sequence_length)
    ids = torch.randint(config.vocab_size, shape)
    positions = (torch.arange(training.sequence_length) % (training.sequence_length // 2)).expand(shape)
    batch = {"input_ids": ids, "shift_labels": ids, "position_ids": positions}
    num_micro_batches = min(training.global_batch_size // training.per_device_batch_size, 2)
    with MemoryMeter() as meter:
        model = make_step_model(recipe, config)
        optimizers = optimizers_of_recipe(recipe.optimizer, model)
        for _ in range(2):
            parts = run_step(model, optimizers, batch, num_micro_batches, bfloat16=False, meter=meter)
    states = [value for optimizer in optimizers for entry in optimizer.state.values() for value in entry.values()]
    return parts, sum(p.nbytes for p in model.parameters()), sum(state.nbytes for state in states)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_tensors_take_what_real_ones_take(make_recipe, shape, optimizer):
    recipe = make_recipe(**LARGER, training=SHAPES[shape], optimizer={"name": optimizer})
    config = recipe.model_config_for(512, {})
    estimated = step_memory(recipe, config)
    parts, weights, states = real_step(recipe, config)
    assert estimated.weights == estimated.gradients == weights
    assert estimated.optimizer_state == states
    assert estimated.update == pytest.approx(parts["update"], rel=0.05, abs=4096)
    assert estimated.activations == pytest.approx(parts["activations"], rel=0.02)
    assert estimated.backward == pytest.approx(parts["backward"], rel=0.05)
    assert estimated.accumulates == (shape == "accumulated")


def test_recomputed_blocks_keep_less(make_recipe):
    def activations(every):
        recipe = make_recipe(**LARGER, training={**SHAPES["plain"], "gradient_checkpointing": every})
        return step_memory(recipe, recipe.model_config_for(512, {})).activations

    none, third, all_blocks = activations(False), activations(3), activations(True)
    assert all_blocks < 0.6 * none
    assert all_blocks < third < none


def test_processes_share_what_sharding_shares(make_recipe):
    shape = {"global_batch_size": 16, "per_device_batch_size": 2}
    one = step_memory(alone := make_recipe(training=shape), config := alone.model_config_for(300, {}))
    replicated = step_memory(alone, config, num_processes=4)
    assert replicated.weights == one.weights
    assert replicated.exchange == one.weights  # buckets
    sharded = step_memory(make_recipe(training={**shape, "sharding": "full"}), config, num_processes=4)
    for name in ("weights", "gradients", "optimizer_state"):
        assert getattr(sharded, name) == pytest.approx(getattr(one, name) / 4, abs=1)
    assert sharded.activations == one.activations
    assert sharded.snapshot == one.snapshot  # the main process saves all of it


def test_an_average_of_the_weights_is_another_copy(make_recipe):
    plain = make_recipe()
    config = plain.model_config_for(300, {})
    without = step_memory(plain, config)
    with_average = step_memory(make_recipe(optimizer={"ema_decay": 0.99}), config)
    assert with_average.ema == without.weights
    assert with_average.backward_peak - without.backward_peak == without.weights
    assert with_average.snapshot - without.snapshot == without.weights


def test_large_logits_are_never_held_whole(make_recipe):
    fields = {"model": LARGER["model"], "tokenizer": {"vocab_size": 60000}}
    recipe = make_recipe(
        **fields, training={"sequence_length": 512, "global_batch_size": 8, "per_device_batch_size": 8}
    )
    memory = step_memory(recipe, recipe.model_config_for(60000, {}))
    assert memory.activations + memory.backward < 8 * 512 * 60000 * 4 / 2


@pytest.mark.slow
def test_against_the_peak_of_a_process(root):
    """A process of its own, whose resident memory is read before and after."""
    done = subprocess.run(
        [sys.executable, "benchmarks/plan.py", "--json"],
        capture_output=True, text=True, cwd=root, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        assert row["estimated"] == pytest.approx(row["measured"], rel=0.25), row["shape"]
