"""Tasks of EleutherAI's lm-evaluation-harness on a checkpoint, as `lm_eval --model hf` runs them.

lm_eval is imported inside the functions: it is an extra, and takes seconds to import.
"""

import difflib
import importlib
import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.training.errors import UserError
from tercet.training.results import TaskResult, Tasks

_BATCH_SIZE = 16


def run_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[str],
    *,
    task_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> Tasks:
    """Run tasks.

    Args:
        model: On its device, in evaluation mode.
        tasks: Names of tasks or groups, the harness's own or of `task_path`.
        task_path: Folder with tasks as YAML files.
        limit: Documents of each task; None takes all.
        num_fewshot: Examples before each question; None takes each task's own number.

    Raises:
        UserError: lm-eval is not installed, a task is not known, or its data cannot be read.
    """
    try:
        harness = f"lm-eval {version('lm_eval')}"
    except PackageNotFoundError:
        raise UserError("--tasks needs the package lm-eval: pip install 'tercet[eval]'") from None
    # By name: its own annotations, which need an extra, are not ours to check.
    simple_evaluate: Any = importlib.import_module("lm_eval").simple_evaluate
    language_model: Any = importlib.import_module("lm_eval.models.huggingface").HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _task_manager(tasks, task_path)
    longest = int(getattr(model.config, "max_position_embeddings", 2048))
    wrapped = language_model(
        pretrained=model, tokenizer=tokenizer, batch_size=_BATCH_SIZE, max_length=longest, device=str(model.device)
    )
    try:
        output: Any = simple_evaluate(
            wrapped, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"--tasks {','.join(tasks)}: {reason}; a task of the harness downloads its data the first time, one of "
            "your own names local files (dataset_path: json)"
        ) from error
    return Tasks(
        harness=harness,
        date=datetime.now(UTC).replace(microsecond=0),
        limit=limit,
        results=_rows(output, limit),
    )


def _task_manager(tasks: Sequence[str], task_path: Path | None) -> Any:
    """Knows the tasks of the folder, and the harness's own where some are asked for."""
    make_manager: Any = importlib.import_module("lm_eval.tasks").TaskManager
    if task_path is not None:
        manager = make_manager(include_path=str(task_path.resolve()), include_defaults=False)
        if all(task in manager.all_tasks for task in tasks):
            return manager
    manager = make_manager(include_path=None if task_path is None else str(task_path.resolve()))
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            where = "" if task_path is None else f" and {task_path}"
            raise UserError(f"--tasks {task}: no such task in lm-eval{where}; {hint}")
    return manager


def _rows(output: Any, limit: int | None) -> list[TaskResult]:
    """The harness's nested results, `{"acc,none": 0.5, "acc_stderr,none": 0.1}` for each task, as rows."""
    rows = []
    for task, values in output["results"].items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            is_measure = isinstance(value, int | float) and not isinstance(value, bool) and filter_name
            if not is_measure or metric.endswith("_stderr") or not math.isfinite(value):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            rows.append(
                TaskResult(
                    task=task,
                    metric=metric,
                    filter=filter_name,
                    value=float(value),
                    standard_error=float(error) if isinstance(error, int | float) and math.isfinite(error) else None,
                    higher_is_better=output["higher_is_better"].get(task, {}).get(metric),
                    num_fewshot=int(output["n-shot"].get(task) or 0),
                    num_documents=int(output["n-samples"].get(task, {}).get("effective", 0)),
                    version=str(output["versions"].get(task) or ""),
                    limit=limit,
                )
            )
    return rows
