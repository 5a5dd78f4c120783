"""What of a recipe would fit into the memory that is there: fewer rows, recomputed blocks, more devices."""

from tercet.modeling import TercetConfig
from tercet.training.memory import StepMemory, step_memory
from tercet.training.out_of_memory import fewer_rows
from tercet.training.recipe import Recipe

_MOST_PROCESSES = 4096
_SHORTEST_ROW = 16


def what_would_fit(
    recipe: Recipe,
    config: TercetConfig,
    asked: StepMemory,
    available: int,
    *,
    num_processes: int,
    bfloat16: bool,
    on_cpu: bool,
) -> list[str]:
    """Settings that fit, the cheapest first; each is enough by itself.

    Args:
        asked: What the recipe as it is needs of one process.
        available: Bytes for one process.
        on_cpu: Processes on a CPU share its memory, so more of them are no remedy.
    """
    remedies = []
    resident = asked.resident + (asked.snapshot if on_cpu else 0)
    can_fit = resident <= available
    for checkpointing in dict.fromkeys((recipe.training.gradient_checkpointing, True)) if can_fit else ():
        tried = _with(recipe, gradient_checkpointing=checkpointing)
        rows = _most_rows(tried, config, available, num_processes=num_processes, bfloat16=bfloat16, on_cpu=on_cpu)
        if rows is not None:
            changed = [] if checkpointing == recipe.training.gradient_checkpointing else ["gradient_checkpointing=true"]
            changed += [f"per_device_batch_size={rows}"] if rows != recipe.training.per_device_batch_size else []
            remedies.append(" ".join(f"--set training.{setting}" for setting in changed))
    if not on_cpu and (count := _enough_processes(asked, available, num_processes)) is not None:
        remedies.append(f"--processes {count} --set training.sharding=full")
    if not remedies:
        share = available / resident
        few = f"a model of about {share:.1%} of these parameters: a smaller model.hidden_size or num_hidden_layers"
        remedies.append(
            few
            if share < 1
            else _shorter_rows(recipe, config, available, num_processes=num_processes, bfloat16=bfloat16, on_cpu=on_cpu)
        )
    return remedies


def _with(recipe: Recipe, **changes: object) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})


def _most_rows(
    recipe: Recipe, config: TercetConfig, available: int, *, num_processes: int, bfloat16: bool, on_cpu: bool
) -> int | None:
    """The most rows of a micro-batch that fit, the recipe's own at most; None if not even one does."""

    def fits(rows: int) -> bool:
        tried = _with(recipe, per_device_batch_size=rows)
        need = step_memory(tried, config, num_processes=num_processes, bfloat16=bfloat16, on_cpu=on_cpu)
        return peak(need, on_cpu=on_cpu) <= available

    rows, sizes = recipe.training.per_device_batch_size, list(recipe.training.batch_sizes())
    if not fits(1):
        return None
    while rows > 1 and not fits(rows):
        rows = fewer_rows(rows, sizes, num_processes)
    return rows


def _shorter_rows(
    recipe: Recipe, config: TercetConfig, available: int, *, num_processes: int, bfloat16: bool, on_cpu: bool
) -> str:
    """The settings with the longest row that fits alone, its blocks recomputed; rows are halved to find it."""
    length = recipe.training.sequence_length
    while (length := length // 2) >= _SHORTEST_ROW:
        tried = _with(recipe, sequence_length=length, per_device_batch_size=1, gradient_checkpointing=True)
        need = step_memory(tried, config, num_processes=num_processes, bfloat16=bfloat16, on_cpu=on_cpu)
        if peak(need, on_cpu=on_cpu) <= available:
            return (
                f"--set training.sequence_length={length} --set training.per_device_batch_size=1 "
                "--set training.gradient_checkpointing=true"
            )
    return "a device with more memory"


def peak(memory: StepMemory, *, on_cpu: bool) -> int:
    """What a process must have of the device that trains; on a CPU what checkpoints are written from is there, too."""
    return memory.peak + (memory.snapshot if on_cpu else 0)


def _enough_processes(asked: StepMemory, available: int, num_processes: int) -> int | None:
    count = num_processes
    while count < _MOST_PROCESSES:
        count *= 2
        if asked.sharded(count).peak <= available:
            return count
    return None
