"""Runs a causal language model on a text and records what happens: `trace`.

Shapes: P prompt tokens, S tokens in all, L layers, H query heads, E hidden_size, F intermediate_size, V vocab_size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tercet.explorer.activations import collect_activations
from tercet.explorer.anatomy import Anatomy, find_parts, mlp_width, text_config
from tercet.explorer.costs import has_experts, weight_bytes
from tercet.explorer.facts import max_positions, model_facts, name_of, versions
from tercet.explorer.reach import Reach
from tercet.explorer.record import NUM_CANDIDATES, Activations, LeftOut, Sampling, TokenFacts, Trace
from tercet.explorer.recorder import record_pass
from tercet.explorer.timing import Inference, make_steps, measure_inference
from tercet.explorer.tokens import TokenReader, read_tokens, stands_for
from tercet.explorer.words import BilingualError
from tercet.training.hardware import free_memory_bytes
from tercet.training.samples import document_start

DEFAULT_NEW_TOKENS = 16
DEFAULT_TIMING_S = 10.0


@torch.no_grad()
def trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | None = None,
    name: str | None = None,
    timing_s: float = DEFAULT_TIMING_S,
    step: Callable[[str], None] = lambda line: None,
) -> Trace:
    """Continue a text and record the run: tokens, activations, costs and times of each pass.

    The text is read as `tercet generate` reads it: as a document's beginning, behind the tokenizer's start token if it
    has one. Model, random state and modes are afterwards as they were.

    Args:
        model: Any causal language model of transformers, on any device.
        tokenizer: Its tokenizer.
        text: The prompt.
        new_tokens: How many tokens follow at most; fewer where the model ends the text.
        sampling: How they are drawn; None takes the likeliest each time, as `generate(do_sample=False)`.
        name: For the page's title; the checkpoint's name if None.
        timing_s: Seconds that repetitions for the sake of timing may take, after the first.
        step: Told what is done now, in words; called with "" between the passes of one such part. What it raises stops
            the run.

    Raises:
        BilingualError: The prompt is empty or too long, or the model is not one that can be recorded.
    """
    if new_tokens < 1:
        raise BilingualError("new_tokens.few", new_tokens=new_tokens)
    anatomy = find_parts(model)
    prompt_ids = _prompt_ids(tokenizer, text)
    check_room(model, prompt_ids.shape[1], new_tokens)
    _check_memory(model, anatomy, prompt_ids.shape[1] + new_tokens)
    prompt_ids = prompt_ids.to(model.device)
    with _in_evaluation_mode(model):
        step("choosing the new tokens")
        ids = _choose(model, prompt_ids, new_tokens, sampling)
        inference = measure_inference(model, ids, prompt_ids.shape[1], budget_s=timing_s, step=step)
        step("recording the run")
        record = record_pass(model, anatomy, ids)
        activations, left_out = collect_activations(model, anatomy, record, ids, step)
        facts = model_facts(model, anatomy, record, name or name_of(model))
    num_prompt = prompt_ids.shape[1]
    reader = TokenReader(tokenizer)
    tokens = read_tokens(reader, ids[0].tolist(), text, num_prompt)
    losses = F.cross_entropy(activations.logits[:-1], ids[0, 1:].cpu(), reduction="none").tolist()
    weights = weight_bytes(model, anatomy)
    reaches = [Reach(layer.window, layer.chunk) for layer in facts.layers]
    cached = make_steps(inference.cached or inference.uncached[:1], weights, reaches)
    return Trace(
        model=facts,
        prompt=text,
        sampling=sampling,
        num_prompt_tokens=num_prompt,
        tokens=tokens,
        vocabulary=_vocabulary(reader, activations, ids, num_prompt),
        prefill=cached[0],
        decode=cached[1:],
        uncached=make_steps(inference.uncached, weights, reaches),
        cache_bytes_per_token=_cache_bytes_per_token(inference, facts.num_layers),
        losses=tuple(losses),
        bits_per_byte=_bits_per_byte(tokens[:num_prompt], losses),
        activations=activations,
        left_out=(*left_out, *_caveats(model, inference, tokens[:num_prompt], text, activations, ids, sampling)),
        versions=versions(),
    )


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """(1, P)."""
    if not text:
        raise BilingualError("prompt.empty")
    try:
        text.encode()
    except UnicodeEncodeError:  # so Python reads bytes of a command line that are no UTF-8
        raise BilingualError("prompt.utf8") from None
    ids = document_start(cast(PreTrainedTokenizerFast, tokenizer), text)
    start = 0 if tokenizer.bos_token_id is None else 1
    if ids.shape[1] <= start:
        raise BilingualError("prompt.tokens")
    return ids


def check_room(model: PreTrainedModel, num_prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a text that is longer than the context that the model was made for.

    Raises:
        BilingualError: Names the counts and the remedy.
    """
    longest = max_positions(model)
    if longest is None or num_prompt_tokens + new_tokens <= longest:
        return
    if num_prompt_tokens >= longest:
        raise BilingualError("prompt.long", tokens=num_prompt_tokens, context=longest)
    most = longest - num_prompt_tokens
    raise BilingualError("new_tokens.many", prompt=num_prompt_tokens, new_tokens=new_tokens, context=longest, most=most)


def _check_memory(model: PreTrainedModel, anatomy: Anatomy, num_tokens: int) -> None:
    """Refuse a record that this machine cannot hold: attention's part grows with the square of the text."""
    config, num_layers = text_config(model), len(anatomy.blocks)
    width = getattr(config, "hidden_size", 0)
    heads = getattr(config, "num_attention_heads", 1)
    inner = mlp_width(config)
    numbers = (
        num_layers * num_tokens * (heads * num_tokens + 6 * width + 3 * inner) + 3 * num_tokens * config.vocab_size
    )
    needed, free = 4 * numbers, free_memory_bytes()
    if needed > free:
        sizes = {"needed": f"{needed / 1e9:.1f} GB", "free": f"{free / 1e9:.1f} GB"}
        raise BilingualError("memory", tokens=num_tokens, **sizes)


@contextmanager
def _in_evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # One by one: a part that was frozen in evaluation mode stays so.
        for module, training in modes:
            module.training = training


def _choose(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, sampling: Sampling | None) -> torch.Tensor:
    """The prompt and what `generate()` makes of it, (1, S); penalties that a checkpoint asks for are off."""
    defaults = model.generation_config
    pad = defaults.pad_token_id if defaults.pad_token_id is not None else 0  # of one row nothing is padded
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling is not None:
        top_k = 0 if sampling.top_k is None else sampling.top_k
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_k": top_k, "top_p": sampling.top_p}
    config = GenerationConfig(
        max_new_tokens=new_tokens, eos_token_id=defaults.eos_token_id, pad_token_id=pad, use_cache=True, num_beams=1,
        repetition_penalty=1.0, no_repeat_ngram_size=0, **chosen,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        torch.manual_seed(0 if sampling is None else sampling.seed)
        return cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def _cache_bytes_per_token(inference: Inference, num_layers: int) -> tuple[int, ...]:
    layers = inference.cached[-1].after if inference.cached else []
    return tuple(layer.column for layer in layers) or (0,) * num_layers


def _vocabulary(reader: TokenReader, activations: Activations, ids: torch.Tensor, num_prompt: int) -> dict[int, str]:
    """Text of the ids that a page may show."""
    steps = activations.logits[num_prompt - 1 :]
    likeliest = steps.topk(min(NUM_CANDIDATES, steps.shape[-1]), dim=-1).indices
    shown = {*ids[0].tolist(), *likeliest.flatten().tolist(), *activations.lens_ids.flatten().tolist()}
    return {id: reader.text(id) for id in sorted(shown)}


def _bits_per_byte(prompt: Sequence[TokenFacts], losses: Sequence[float]) -> float | None:
    scored = [(len(token.bytes) // 2, loss) for token, loss in zip(prompt[1:], losses, strict=False)]
    num_bytes = sum(size for size, _ in scored)
    return sum(loss for _, loss in scored) / math.log(2) / num_bytes if num_bytes else None


def _caveats(
    model: PreTrainedModel,
    inference: Inference,
    prompt: Sequence[TokenFacts],
    text: str,
    activations: Activations,
    ids: torch.Tensor,
    sampling: Sampling | None,
) -> list[LeftOut]:
    caveats = []
    if not inference.cached:
        caveats.append(LeftOut("cache", "no_cache"))
    if not stands_for(prompt, text):
        caveats.append(LeftOut("tokens", "text_changed"))
    if has_experts(model):
        caveats.append(LeftOut("weight_bytes_read", "all_experts_counted"))
    likeliest = activations.logits[len(prompt) - 1 : -1].argmax(-1)
    differing = int((likeliest != ids[0, len(prompt) :].cpu()).sum())
    if sampling is None and differing:
        caveats.append(LeftOut("logits", "ties", {"differing": str(differing)}))
    return caveats
