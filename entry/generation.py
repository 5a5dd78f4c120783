"""`tercet generate`, and what `tercet chat` shares with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import typer
from transformers import (
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)

from tercet.caches import FULL, compile_decode, is_for_tercet, make_cache, quantization_named
from tercet.hub_checkpoints import local_checkpoint
from tercet.loading import load_checkpoint_folder
from tercet.prompt_cache import check_path, fill_and_save, open_cache
from tercet.streaming import TokenPrinter
from tercet.training.errors import UserError
from tercet.training.samples import document_start


@dataclass(frozen=True)
class Sampling:
    """How a continuation is chosen; a temperature of 0 takes the likeliest token each time."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None = None


@dataclass(frozen=True)
class CacheOptions:
    """What the user said about the cache.

    Attributes:
        kind: The value of --cache; None where it was not given.
        compile: Whether each token after the prompt is one compiled function.
        prompt_file: Where the prompt's keys and values are kept.
    """

    kind: str | None = None
    compile: bool = False
    prompt_file: Path | None = None


def run_generate(checkpoint: Path, prompt: str, sampling: Sampling, seed: int | None, options: CacheOptions) -> None:
    """`tercet generate`: prints the prompt, then tokens as they come."""
    quantization = quantization_named(options.kind or FULL)
    if options.prompt_file is not None:
        check_path(options.prompt_file)
    model, tokenizer = load_checkpoint_folder(local_checkpoint(checkpoint))
    if seed is not None:
        set_seed(seed)
    ids = document_start(tokenizer, prompt).to(model.device)
    check_room(model, ids.shape[1], sampling.max_new_tokens)
    if options.prompt_file is None:
        cache = make_cache(model, quantization)
        if options.compile:
            compile_decode(model, cache)
    else:
        cache = _cache_from_file(options.prompt_file, model, ids, options)
    typer.echo(prompt, nl=False)
    stream_continuation(model, tokenizer, ids, sampling, cache)


def _cache_from_file(path: Path, model: PreTrainedModel, ids: torch.Tensor, options: CacheOptions) -> Cache:
    tercet_model = is_for_tercet(model, "--prompt-cache")
    cache, saved_ids = open_cache(path, tercet_model, ids, options.kind)
    if options.compile:
        compile_decode(model, cache)
    fill_and_save(path, tercet_model, ids, cache, saved_ids)
    return cache


def check_room(model: PreTrainedModel, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a text longer than learned positions allow; warn of one longer than what a rotary model was trained on.

    Args:
        model: What will generate.
        num_prompt_tokens: All of the prompt's, whether or not a cache holds them already.
        max_new_tokens: What may follow.

    Raises:
        UserError: Names the lengths and the remedy.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    total = num_prompt_tokens + max_new_tokens
    if longest is None or total <= longest:
        return
    if getattr(model.config, "position_embedding_type", None) == "learned" or model.config.model_type == "gpt2":
        room = longest - num_prompt_tokens
        remedy = f"ask for at most {room}" if room > 0 else "shorten the text"
        raise UserError(
            f"{num_prompt_tokens} prompt tokens and --max-new-tokens {max_new_tokens} go beyond the model's "
            f"{longest} learned positions: {remedy}"
        )
    typer.echo(f"note: {total} tokens is longer than the {longest} that the model was trained on", err=True)


def stream_continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    ids: torch.Tensor,
    sampling: Sampling,
    cache: Cache | None = None,
    stop: StoppingCriteria | None = None,
) -> torch.Tensor:
    """Generate after `ids` (1, T) and print text as it comes; returns all ids, (1, T + new).

    Args:
        model: What generates.
        tokenizer: Its tokenizer.
        ids: The whole prompt.
        sampling: How many tokens, and how each is chosen.
        cache: Holds a beginning of `ids`, possibly none of them; the model makes its own where it is None.
        stop: Asked behind every token whether to end there.

    Raises:
        UserError: The step was to be compiled, and this machine's compiler cannot.
    """
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k is not None:
            chosen["top_k"] = sampling.top_k
    if cache is not None:
        # Said, as a checkpoint's own settings may say otherwise, and then all tokens would be fed at every step.
        chosen |= {"cache": cache, "use_cache": True}
    if stop is not None:
        chosen["stopping_criteria"] = StoppingCriteriaList([stop])
    streamer = TokenPrinter(tokenizer)
    try:
        with torch.no_grad():
            return cast(Any, model).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_new_tokens, streamer=streamer,
                **chosen,
            )  # fmt: skip
    except Exception as error:
        from torch._dynamo.exc import BackendCompilerFailed  # the compiler is loaded by --compile, or not at all

        if not isinstance(error, BackendCompilerFailed):
            raise
        typer.echo()  # the prompt stands there without an end
        reason = f"{type(error.inner_exception).__name__}: {error.inner_exception}".splitlines()[0]
        raise UserError(f"--compile: torch.compile does not work on this machine ({reason}): leave it out") from error
