"""Where a run begins: at its newest whole checkpoint, at another run's, or at the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from transformers import AutoConfig, PreTrainedModel

from tercet.training.agreement import Agreement
from tercet.training.checkpoints import check_whole, load_checkpoint, newest_whole, read_position, read_state
from tercet.training.counts import counted
from tercet.training.ema import WeightAverage
from tercet.training.errors import UserError
from tercet.training.recipe import Recipe
from tercet.training.run_folder import RECIPE_NAME, differences
from tercet.training.run_state import RunState
from tercet.training.step_batches import StepBatches
from tercet.training.token_set import PreparedData

# Of a config: who wrote it, and what decides no value.
_NO_MODEL_FACTS = ("transformers_version", "architectures", "auto_map", "dtype", "_name_or_path")


def starting_point(
    recipe: Recipe,
    output_dir: Path,
    data: PreparedData,
    *,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    average: WeightAverage | None,
    accelerator: Accelerator,
    agreement: Agreement,
    batches: StepBatches,
    say: Callable[[str], None],
) -> tuple[RunState, Path | None]:
    """Load what the run goes on from; all processes call this.

    Args:
        batches: Go on where the checkpoint has them, if they have a state.

    Returns:
        Where the run stands, and its own checkpoint that it goes on from, None if it has none.

    Raises:
        UserError: No checkpoint is whole, or the one to go on from is of other data, another model, or a stream that
            another number of processes read.
    """
    branch = recipe.training.branch_from
    own = _from_main(agreement, accelerator, lambda: str(newest_whole(output_dir, say) or ""))
    if not own and branch is None:
        start = RunState(num_processes=accelerator.num_processes)
        return replace(start, data_fingerprint=data.fingerprint, tokenizer_hash=data.settings["tokenizer"]), None
    folder = Path(own) if own else Path(str(branch)).expanduser()
    if not own:
        _from_main(agreement, accelerator, lambda: _check_branch(folder, model))
    state = read_state(folder)
    _check_data(state, data, folder)
    is_stream = batches.state_dict() is not None
    if is_stream and state.num_processes != accelerator.num_processes:
        raise UserError(
            f"{folder} was saved by {counted(state.num_processes, 'process', 'processes')}, and this run has "
            f"{accelerator.num_processes}: a stream goes on only with as many. Start {state.num_processes}, or prepare "
            "the data (data.stream: false)"
        )
    if not own:
        state = _branched(state, recipe, folder, say)
    load_checkpoint(folder, model=model, optimizers=optimizers, accelerator=accelerator, average=average)
    if is_stream:
        batches.load_state_dict(read_position(folder, accelerator.process_index))
    state = replace(state, num_processes=accelerator.num_processes)
    return state, folder if own else None


def _from_main(agreement: Agreement, accelerator: Accelerator, work: Callable[[], str]) -> str:
    """What the main process finds, in every process; a mistake of the user's ends all of them alike."""
    found, mistake = "", ""
    if accelerator.is_main_process:
        try:
            found = work()
        except UserError as error:
            mistake = str(error)
    mistake = agreement.text_of_main(mistake)
    if mistake:
        raise UserError(mistake)
    return agreement.text_of_main(found)


def _check_data(state: RunState, data: PreparedData, folder: Path) -> None:
    if state.data_fingerprint == data.fingerprint:
        return
    if state.tokenizer_hash not in ("", data.settings["tokenizer"]):
        raise UserError(
            f"the tokenizer is another than that of {folder}, whose ids would mean something else: restore the "
            "tokenizer, choose another output folder, or --restart"
        )
    raise UserError(
        f"the text has changed since {folder} was saved, and the run cannot go on in it as if it had not: "
        "restore the text, choose another output folder, or --restart"
    )


def _check_branch(folder: Path, model: PreTrainedModel) -> str:
    check_whole(folder, "training.branch_from")
    theirs, ours = AutoConfig.from_pretrained(folder).to_dict(), model.config.to_dict()
    names = sorted({*theirs, *ours} - set(_NO_MODEL_FACTS))
    if different := [name for name in names if theirs.get(name) != ours.get(name)]:
        raise UserError(
            f"training.branch_from {folder} is of another model (different: {', '.join(different)}): "
            "give the recipe its settings"
        )
    return ""


def _branched(state: RunState, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> RunState:
    if state.step >= recipe.training.num_steps:
        raise UserError(
            f"training.branch_from {folder} has done {state.step} steps, and training.num_steps is "
            f"{recipe.training.num_steps}: steps count on from the branch, so give more"
        )
    theirs = yaml.safe_load((folder / RECIPE_NAME).read_text("utf-8"))
    names = [name for name in differences(theirs, recipe) if name != "training.branch_from"]
    say(f"branches from {folder}, step {state.step}; different in its recipe: {', '.join(names) or 'nothing'}")
    # The best checkpoint of the other run is not in this folder.
    return replace(state, best_bits_per_byte=None, best_step=None)
