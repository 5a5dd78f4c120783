"""What a launcher asks for is followed, refused or said to be ignored; the processes and their shares are checked."""

import os
import shlex
import subprocess
from argparse import Namespace

import pytest

from tercet.training.errors import UserError
from tercet.training.launch import follow_launcher, make_accelerator
from tercet.training.recipe import load_recipe

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def told(recipe, environment):
    _, lines = follow_launcher(recipe, environment)
    return "\n".join(lines)


def test_without_a_launcher_nothing_is_said(make_recipe):
    recipe = make_recipe()
    assert follow_launcher(recipe, {}) == (recipe, [])
    by_torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    assert follow_launcher(recipe, by_torchrun) == (recipe, [])


def test_an_fsdp_config_shards(make_recipe):
    recipe, lines = follow_launcher(make_recipe(), FSDP2)
    assert recipe.training.sharding == "full"
    assert "read as training.sharding: full" in lines[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set training.gradient_checkpointing"),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16 is not used.*float32"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision bf16 is not used.*float32"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "training.compile decides"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps is not used"),
    ],
)
def test_what_is_not_followed_is_said(make_recipe, settings, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(told(make_recipe(), settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP 1.*fsdp_version: 2"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params.*remove it"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed.*FSDP2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM.*FSDP2"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 tasks.*slurm.sh"),
    ],
)
def test_what_cannot_be_done_is_refused(make_recipe, settings, words):
    with pytest.raises(UserError, match=words):
        follow_launcher(make_recipe(), settings)


def test_one_process_where_several_were_asked_for_is_refused(make_recipe):
    """The environment is what accelerate's own launcher leaves for --num_processes 2 --cpu, of today's version."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def environment(num_processes):
        arguments = launch_command_parser().parse_args(
            ["--cpu", "--num_processes", str(num_processes), "-m", "tercet.training", "demo"]
        )
        arguments.use_cpu, arguments.num_machines = arguments.cpu, 1
        arguments.mixed_precision, arguments.num_cpu_threads_per_process = "no", 1
        arguments.dynamo_backend = "no"
        return prepare_simple_launcher_cmd_env(Namespace(**vars(arguments)))[1]

    # pytest's own environment is in it; nothing of it may look like a launcher's.
    with pytest.raises(UserError, match=r"asked for several processes on CPUs and started one.*torchrun"):
        follow_launcher(make_recipe(), environment(2))
    follow_launcher(make_recipe(), environment(1))


def test_processes_that_accelerate_does_not_see_are_noticed(make_recipe, tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    monkeypatch.setenv("WORLD_SIZE", "1")  # one, so that this process does not wait for another
    accelerator = make_accelerator(make_recipe(), tmp_path)
    assert accelerator.num_processes == 1
    from tercet.training import launch

    for name in ("WORLD_SIZE", "PMI_SIZE"):
        with monkeypatch.context() as patch:
            patch.delenv("WORLD_SIZE")
            patch.setenv(name, "2")
            with pytest.raises(UserError, match="2 processes were started and accelerate sees 1"):
                launch._check_processes(make_recipe(), accelerator.num_processes)


def test_a_number_in_the_environment_divides_no_loss(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator(make_recipe(), tmp_path).gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("training", "num_processes", "words"),
    [
        ({}, 2, None),
        ({}, 3, r"training.global_batch_size \(4\).*\(2\) x 3 processes"),
        ({"batch_size_warmup": [{"until_step": 2, "global_batch_size": 2}]}, 2, r"until step 2 \(2\)"),
    ],
)
def test_every_batch_divides_among_the_processes(make_recipe, monkeypatch, training, num_processes, words):
    from tercet.training.launch import _check_processes

    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    recipe = make_recipe(training=training)
    if words is None:
        _check_processes(recipe, num_processes)
        return
    with pytest.raises(UserError, match=words):
        _check_processes(recipe, num_processes)


def accelerate_configs(root):
    return sorted((root / "recipes" / "accelerate").glob("*.yaml"))


def test_the_configs_are_there(root):
    assert [path.stem for path in accelerate_configs(root)] == ["multi_node", "one_node_ddp", "one_node_fsdp2"]


@pytest.mark.parametrize("name", ["one_node_ddp", "one_node_fsdp2", "multi_node"])
def test_a_config_and_its_command_are_what_accelerate_reads(root, make_recipe, name, monkeypatch):
    """Accelerate's loader takes the file, its parser the command in the comments, and the run what comes of both."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = root / "recipes" / "accelerate" / f"{name}.yaml"
    assert load_config_from_file(str(path)).num_processes
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#   ")]
    words = shlex.split(" ".join(lines).replace("\\ ", ""))
    assert words[:2] == ["accelerate", "launch"]
    arguments = launch_command_parser().parse_args(words[2:])
    assert arguments.config_file == path.name
    assert arguments.module and arguments.training_script == "tercet.training"
    recipe_name, *options = arguments.training_script_args
    load_recipe(recipe_name, [word for word in options if word != "--set"])

    # What `accelerate launch` makes of the two on a machine with GPUs.
    arguments.config_file = str(path)
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.use_fsdp == (name == "one_node_fsdp2")
    assert arguments.use_fsdp or arguments.multi_gpu
    assert arguments.num_processes % arguments.num_machines == 0
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    environment = {key: value for key, value in prepare_multi_gpu_env(arguments).items() if key not in os.environ}
    recipe, said = follow_launcher(make_recipe(training={"sharding": "none"}), environment)
    assert recipe.training.sharding == ("full" if arguments.use_fsdp else "none")
    # bf16 is said not to be used: there is no GPU here.
    assert len(said) == 1 + arguments.use_fsdp


def test_the_slurm_script_is_a_shell_script(root):
    subprocess.run(["bash", "-n", str(root / "recipes" / "slurm.sh")], check=True)


def test_the_slurm_script_refuses_to_begin_anew_in_every_job(root):
    done = subprocess.run(
        ["bash", str(root / "recipes" / "slurm.sh"), "demo", "out/demo", "--restart"],
        capture_output=True, text=True, env={**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--restart would begin anew in every job" in done.stderr


def test_configs_and_script_come_with_the_package():
    from importlib import resources

    folder = resources.files("tercet.recipes")
    assert (folder / "slurm.sh").is_file()
    assert (folder / "accelerate" / "one_node_fsdp2.yaml").is_file()
