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
from tercet.modeling import TercetCache
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


@dataclass(frozen=True)
class Request:
    """What `tercet generate` was asked for.

    Attributes:
        prompt: Text to continue.
        seed: Of the draws; None for others each time.
        num_samples: How many continuations.
        device: Where the model runs; None for the best at hand.
    """

    prompt: str
    seed: int | None = None
    num_samples: int = 1
    device: str | None = None


def run_generate(checkpoint: Path, request: Request, sampling: Sampling, options: CacheOptions) -> None:
    """`tercet generate`: prints the prompt, then tokens as they come; several continuations when all are there."""
    quantization = quantization_named(options.kind or FULL)
    if options.prompt_file is not None:
        check_path(options.prompt_file)
    model, tokenizer = load_checkpoint_folder(local_checkpoint(checkpoint), request.device)
    if request.seed is not None:
        set_seed(request.seed)
    ids = document_start(tokenizer, request.prompt).to(model.device)
    check_room(model, ids.shape[1], sampling.max_new_tokens)
    if options.prompt_file is None:
        cache = make_cache(model, quantization)
        if options.compile:
            compile_decode(model, cache)
    else:
        cache = _cache_from_file(options.prompt_file, model, ids, options)
    try:
        if request.num_samples == 1:
            typer.echo(request.prompt, nl=False)
            stream_continuation(model, tokenizer, ids, sampling, cache)
        else:
            texts = _continuations(model, tokenizer, ids, sampling, cache, request.num_samples)
            for number, text in enumerate(texts, start=1):
                typer.echo(f"--- {number} of {request.num_samples} ---\n{request.prompt}{text}")
    except KeyboardInterrupt:  # nothing is kept, so that there is nothing to say
        typer.echo()
        raise typer.Exit(130) from None


@torch.no_grad()
def _continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    ids: torch.Tensor,
    sampling: Sampling,
    cache: Cache | None,
    num_samples: int,
) -> list[str]:
    """Several texts that go on from `ids` (1, T), drawn side by side; a Tercet model reads the prompt once for all."""
    if isinstance(cache, TercetCache) and ids.shape[1] > 1:
        if cache.length < ids.shape[1] - 1:
            model(ids[:, cache.length : -1], cache=cache, logits_to_keep=1)
        cache = cache.fork(num_samples)
    rows = ids.repeat(num_samples, 1)
    output = cast(Any, model).generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=sampling.max_new_tokens,
        **_chosen(sampling, cache),
    )  # fmt: skip
    new_ids = output[:, ids.shape[1] :]
    return [str(tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for row in new_ids]


def _chosen(sampling: Sampling, cache: Cache | None) -> dict[str, Any]:
    """What `generate()` is told of the draws and of the cache."""
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k is not None:
            chosen["top_k"] = sampling.top_k
    if cache is not None:
        # Said, as a checkpoint's own settings may say otherwise, and then all tokens would be fed at every step.
        chosen |= {"cache": cache, "use_cache": True}
    return chosen


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
    chosen = _chosen(sampling, cache)
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
