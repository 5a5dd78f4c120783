"""Text from the model, for people to read."""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError
from tercet.training.results import Sample

SAMPLES_NAME = "samples.jsonl"

PromptStart = Callable[[PreTrainedTokenizerFast, str], torch.Tensor]


@torch.no_grad()
def make_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int = 0,
    begin: PromptStart | None = None,
) -> list[Sample]:
    """Continue each prompt once, sampled.

    The random state of the CPU and of the model's device is left as it was.

    Args:
        begin: Makes what the model reads of a prompt: `document_start`, if not given, or `message_start`.

    Returns:
        Prompt as the model reads it, continuation and the settings in words.
    """
    begin = begin or document_start
    was_training = model.training
    model.eval()
    samples = []
    max_new_tokens = min(max_new_tokens, model.config.max_position_embeddings - 1)
    try:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for prompt in prompts:
                prompt_ids = begin(tokenizer, prompt).to(model.device)
                if begin is message_start:
                    prompt = str(tokenizer.decode(prompt_ids[0]))
                output = cast(Any, model).generate(
                    prompt_ids,
                    attention_mask=torch.ones_like(prompt_ids),
                    max_new_tokens=max_new_tokens,
                    do_sample=True,
                    temperature=temperature,
                    top_p=top_p,
                )
                text = str(tokenizer.decode(output[0, prompt_ids.shape[1] :], skip_special_tokens=True))
                samples.append(Sample(prompt=prompt, text=text, settings=f"temperature {temperature}, top-p {top_p}"))
    finally:  # a stop in the middle must not leave training without dropout
        model.train(was_training)
    return samples


def record_samples(path: Path, step: int, samples: Iterable[Sample]) -> None:
    """Append samples of a step to a file, a JSON object a line: step, prompt, text.

    A step that the file has already, of a run that was killed and has come here again, is written anew, and what a
    torn line holds is lost: lines of a step are a function of the step.
    """
    earlier = [record for record in read_samples(path) if record["step"] < step]
    records = [*earlier, *({"step": step, "prompt": sample.prompt, "text": sample.text} for sample in samples)]
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())


def read_samples(path: Path) -> list[dict[str, Any]]:
    """What `record_samples` wrote, oldest first; nothing where there is no file."""
    records = []
    for line in path.read_text("utf-8").split("\n") if path.is_file() else []:
        with contextlib.suppress(ValueError, TypeError):
            record = json.loads(line)
            if {"step", "prompt", "text"} <= record.keys():
                records.append(record)
    return records


def document_start(tokenizer: PreTrainedTokenizerFast, prompt: str) -> torch.Tensor:
    """Ids of a prompt as a document begins, (1, T): the start token, then the text, read as plain text."""
    ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # The start token is what every document begins with in training.
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    if not start and not ids:
        raise UserError("the prompt is empty and the tokenizer has no start token (bos_token): give a prompt")
    return torch.tensor([[*start, *ids]])


def message_start(tokenizer: PreTrainedTokenizerFast, prompt: str) -> torch.Tensor:
    """Ids of a conversation in which the prompt is the user's message and the assistant is to speak, (1, T)."""
    messages = [{"role": "user", "content": prompt}]
    return torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
