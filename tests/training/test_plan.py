"""What a plan says against what a run is, and that its remedies are remedies."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console

from tercet.plan_commands import render_plan
from tercet.training.accounting import flops_per_token
from tercet.training.errors import UserError
from tercet.training.pipeline import make_model, train
from tercet.training.plan import Corpus, corpus_of, make_plan
from tercet.training.plan_machine import Machine, this_machine
from tercet.training.timing import StepTiming, time_step
from tercet.training.token_set import PreparedData

CPU = Machine("a CPU", torch.device("cpu"), 1 << 40, 1 << 40, bfloat16=False, on_cpu=True)
GPU = Machine("a GPU", None, 1 << 40, None, bfloat16=True, on_cpu=False)
WIDE = {
    "model": {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout": 0.0},
    "training": {"sequence_length": 512, "global_batch_size": 16, "per_device_batch_size": 16},
}


def plan_for(recipe, machine, folder, **settings):
    return make_plan(recipe, folder, machine, vocab_size=300, **{"timed": False, **settings})


def test_parameters_are_those_of_the_model(make_recipe, small_tokenizer, tmp_path):
    recipe = make_recipe(model={"tie_word_embeddings": False})
    plan = make_plan(recipe, tmp_path, CPU, vocab_size=len(small_tokenizer), timed=False)
    model = make_model(recipe, small_tokenizer)
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.parameters["embeddings"] == plan.parameters["head"] == len(small_tokenizer) * 16
    assert plan.parameters["attention"] == sum(p.numel() for name, p in model.named_parameters() if "self_attn" in name)


def test_work_is_counted_over_all_stages(make_recipe, tmp_path):
    warmup = [{"until_step": 2, "global_batch_size": 2}]
    recipe = make_recipe(training={"num_steps": 10, "per_device_batch_size": 1, "batch_size_warmup": warmup})
    plan = plan_for(recipe, CPU, tmp_path, peak_flops=1e9, mfu=0.5)
    per_token = flops_per_token(recipe.model_config_for(300, {}), 32, training=True)
    assert plan.num_tokens == (2 * 2 + 8 * 4) * 32
    assert plan.flops_per_run == plan.num_tokens * per_token
    assert plan.optimal_tokens == 20 * plan.num_parameters
    assert plan.duration.step_s == pytest.approx(4 * 32 * per_token / 0.5e9)
    assert plan.duration.run_s == pytest.approx(plan.flops_per_run / 0.5e9)
    halved = plan_for(recipe, CPU, tmp_path, peak_flops=1e9, mfu=0.5, num_processes=2)
    assert halved.duration.run_s == pytest.approx(plan.duration.run_s / 2)


def test_tokens_of_the_text(make_recipe, text_folder, tmp_path):
    recipe = make_recipe()
    num_bytes = sum(path.stat().st_size for path in text_folder.iterdir())
    estimated = corpus_of(recipe, tmp_path / "nothing")
    assert estimated.num_tokens == int(num_bytes / 4 * 0.8)
    assert f"{num_bytes:,} bytes of files / 4" in estimated.how
    hub = make_recipe(data={"path": "someone/texts"})
    assert corpus_of(hub, tmp_path).num_tokens is None
    folder = tmp_path / "run"
    train(make_recipe(training={"num_steps": 1}), output_dir=folder, say=lambda line: None)
    counted, data = corpus_of(recipe, folder), PreparedData.open(folder / "data")
    assert counted.is_prepared
    assert counted.num_tokens == round(0.8 * (data.train.num_tokens + data.validation.num_tokens))
    assert plan_for(recipe, CPU, folder).disk.shards == 0
    # What was prepared from another text says nothing about this one.
    other = make_recipe(data={"path": str(next(text_folder.iterdir()))})
    assert not corpus_of(other, folder).is_prepared


def test_missing_text_is_refused(make_recipe, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.txt does not exist"):
        plan_for(make_recipe(data={"path": str(tmp_path / "nowhere.txt")}), CPU, tmp_path)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_fewer_rows_or_recomputation_is_the_remedy_for_memory(make_recipe, tmp_path, machine):
    recipe = make_recipe(**WIDE)
    asked = plan_for(recipe, machine, tmp_path).memory_asked
    tight = dataclasses.replace(machine, memory_bytes=int(0.7 * asked))
    (problem,) = plan_for(recipe, tight, tmp_path).problems
    assert "\n" not in problem
    assert "memory: the step needs" in problem
    remedies = problem.partition("what would fit: ")[2].split("; or ")
    assert any("per_device_batch_size" in remedy for remedy in remedies)
    assert any("gradient_checkpointing=true" in remedy for remedy in remedies)
    for remedy in remedies:
        changes = dict(setting.removeprefix("training.").split("=") for setting in remedy.split() if "=" in setting)
        values = {name: json.loads(value) if name != "sharding" else value for name, value in changes.items()}
        processes = int(remedy.split("--processes ")[1].split()[0]) if "--processes" in remedy else 1
        if processes > 1:  # a global batch of 16 rows is divided among them
            values["per_device_batch_size"] = 16 // processes
        mended = make_recipe(**{**WIDE, "training": {**WIDE["training"], **values}})
        assert plan_for(mended, tight, tmp_path, num_processes=processes).problems == (), remedy


def test_more_devices_are_the_remedy_where_not_one_row_fits(make_recipe, tmp_path):
    recipe = make_recipe(model={"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4})
    resident = plan_for(recipe, GPU, tmp_path).memory.resident
    tight = dataclasses.replace(GPU, memory_bytes=resident * 9 // 10)
    (problem,) = plan_for(recipe, tight, tmp_path).problems
    assert "--set training.sharding=full" in problem
    assert "per_device_batch_size" not in problem
    (problem,) = plan_for(recipe, dataclasses.replace(CPU, memory_bytes=resident // 2), tmp_path).problems
    assert "of these parameters" in problem  # processes on one CPU share its memory


def test_processes_on_a_cpu_share_its_memory(make_recipe, tmp_path):
    recipe = make_recipe(training={"global_batch_size": 8, "per_device_batch_size": 1})
    one, four = (plan_for(recipe, CPU, tmp_path, num_processes=count) for count in (1, 4))
    assert four.memory_asked == 4 * four.memory.peak + four.memory.snapshot
    assert (
        plan_for(recipe, dataclasses.replace(CPU, memory_bytes=four.memory_asked), tmp_path, num_processes=4).problems
        == ()
    )
    assert plan_for(recipe, dataclasses.replace(CPU, memory_bytes=one.memory_asked), tmp_path, num_processes=4).problems


def test_checkpoints_are_as_large_as_those_of_the_run(make_recipe, tmp_path):
    fields = {"num_steps": 12, "save_every": 2, "keep_last": 2, "keep_every": 4}
    recipe = make_recipe(training=fields)
    plan = plan_for(recipe, CPU, tmp_path)
    assert plan.disk.num_checkpoints == 6  # of 12 / 2, all but those that are neither the last two nor multiples of 4
    folder = tmp_path / "run"
    train(recipe, output_dir=folder, say=lambda line: None)
    newest = max((folder / "checkpoints").glob("step-*"))
    written = sum(path.stat().st_size for path in newest.rglob("*.safetensors"))
    model = make_plan(recipe, tmp_path, CPU, vocab_size=300, timed=False)
    assert model.disk.checkpoint == pytest.approx(written, rel=0.1)


def test_a_full_disk_is_refused_with_what_would_fit(make_recipe, tmp_path):
    recipe = make_recipe(training={"num_steps": 100, "save_every": 1, "keep_last": 50})
    disk = plan_for(recipe, CPU, tmp_path).disk
    small = dataclasses.replace(CPU, disk_bytes=disk.shards + disk.model + 10 * disk.checkpoint)
    (problem,) = plan_for(recipe, small, tmp_path).problems
    assert "51 checkpoints" in problem
    assert "--set training.keep_last=9" in problem
    mended = make_recipe(training={"num_steps": 100, "save_every": 1, "keep_last": 9})
    assert plan_for(mended, small, tmp_path).problems == ()
    (problem,) = plan_for(recipe, dataclasses.replace(CPU, disk_bytes=0), tmp_path).problems
    assert "an --output on a disk with" in problem


def test_a_batch_that_does_not_divide_is_refused(make_recipe, tmp_path):
    with pytest.raises(UserError, match=r"\(4\) is not a multiple of .* \(2\) x 3 processes"):
        plan_for(make_recipe(), CPU, tmp_path, num_processes=3)


def test_steps_are_timed_here(make_recipe, tmp_path):
    recipe = make_recipe()
    state = torch.get_rng_state()
    plan = plan_for(recipe, this_machine(recipe, tmp_path), tmp_path, timed=True)
    assert plan.problems == ()
    assert plan.duration.run_s == pytest.approx(8 * plan.duration.step_s)
    assert 1e-4 < plan.duration.step_s < 10
    assert "timed" in plan.duration.how
    assert torch.equal(torch.get_rng_state(), state)
    timing = time_step(recipe, recipe.model_config_for(300, {}), torch.device("cpu"))
    assert timing.step_s <= timing.median_s
    assert timing.num_timed >= 3


def test_an_uneven_timing_is_called_rough(make_recipe, tmp_path):
    even = StepTiming(0.1, 0.11, rows=4, num_timed=9, matmul_rates=(9e10, 8e10))
    assert even.unevenness() == ""
    assert even.matmul_flops == 9e10
    slow = dataclasses.replace(even, median_s=0.3)
    assert slow.unevenness() == "the median step took 3.0 times as long as the fastest"
    jumped = dataclasses.replace(even, matmul_rates=(2e10, 9e10))
    assert jumped.unevenness() == "matrix products ran at 20 and at 90 GFLOP/s"
    recipe = make_recipe()
    plan = plan_for(recipe, CPU, tmp_path, peak_flops=1e9)
    assert "rough" not in shown(plan, recipe)
    rough = dataclasses.replace(plan, duration=dataclasses.replace(plan.duration, unevenness=slow.unevenness()))
    assert "The time is rough: the median step took 3.0 times as long as the fastest" in shown(rough, recipe)


def test_epochs_are_written_as_one_reads_them(make_recipe, tmp_path):
    recipe = make_recipe()
    plan = plan_for(recipe, CPU, tmp_path)
    tiny = dataclasses.replace(plan, num_tokens=7_498_068_212, corpus=Corpus(1000, "counted"))
    text = " ".join(shown(tiny, recipe).split())
    assert "epochs 7,498,068 " in text
    assert "The text is read 7,498,068 times" in text


def test_shorter_rows_are_the_remedy_where_not_one_fits(make_recipe, tmp_path):
    fields = {"sequence_length": 512, "global_batch_size": 2, "per_device_batch_size": 1}
    recipe = make_recipe(model=WIDE["model"], training={**fields, "gradient_checkpointing": True})
    short = make_recipe(
        model=WIDE["model"], training={**fields, "sequence_length": 128, "gradient_checkpointing": True}
    )
    memory = plan_for(short, CPU, tmp_path).memory_asked
    assert memory < plan_for(recipe, CPU, tmp_path).memory_asked
    (problem,) = plan_for(recipe, dataclasses.replace(CPU, memory_bytes=memory), tmp_path).problems
    assert "what would fit: --set training.sequence_length=128 --set training.per_device_batch_size=1" in problem
    # Of weights and the copy that a checkpoint is written from, which have to be there whatever the rows.
    least = plan_for(recipe, CPU, tmp_path).memory
    tight = dataclasses.replace(CPU, memory_bytes=least.resident + least.snapshot - 1)
    assert "of these parameters" in plan_for(recipe, tight, tmp_path).problems[0]


def shown(plan, recipe):
    """The tables as a terminal would show them."""
    with (console := Console(width=110)).capture() as capture:
        console.print(render_plan(plan, recipe))
    return " ".join(capture.get().split())
