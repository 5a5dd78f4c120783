"""`tercet chat`: turns of a conversation through the checkpoint's chat template."""

from pathlib import Path

import torch
import typer
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.caches import FULL, KeptCache, compile_decode, make_cache, quantization_named
from tercet.generation import CacheOptions, Sampling, check_room, stream_continuation
from tercet.loading import load_checkpoint_folder
from tercet.training.errors import UserError

Message = dict[str, str]


def run_chat(checkpoint: Path, system: str | None, sampling: Sampling, options: CacheOptions) -> None:
    """Read a line, answer it, until end of file or /quit."""
    quantization = quantization_named(options.kind or FULL)
    model, tokenizer = load_checkpoint_folder(checkpoint)
    if tokenizer.chat_template is None:
        raise UserError(f"{checkpoint} has no chat template: use `tercet generate` to continue a text")
    _end_where_turns_end(model, tokenizer)
    # Made once before the first line is read, so that options that do not go together are refused now.
    cache = make_cache(model, quantization)
    if options.compile:
        compile_decode(model, cache)
    conversation = Conversation(model, tokenizer, sampling, KeptCache(model, quantization), system)
    typer.echo(
        "Type a message; /reset forgets the conversation, /system TEXT begins one with a system message, /quit leaves.",
        err=True,
    )
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/system" or text.startswith("/system "):
            conversation.begin_with(text.removeprefix("/system").strip() or None)
        elif text:
            conversation.answer(text)


def _end_where_turns_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    # A turn ends where the template ends it, which a base model's settings do not know.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if model.generation_config is not None and end is not None and end != tokenizer.unk_token_id:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]


class Conversation:
    """Messages so far, and the cache of what the model has read of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        sampling: Sampling,
        kept: KeptCache,
        system: str | None = None,
    ) -> None:
        self._model, self._tokenizer, self._sampling, self._kept = model, tokenizer, sampling, kept
        self.begin_with(system)

    def begin_with(self, system: str | None) -> None:
        """Forget all, and let this system message, or none, stand before what comes."""
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._opening)
        self._kept.forget()

    def answer(self, text: str) -> None:
        """Print the model's answer as it comes.

        Raises:
            UserError: The very first message has no room or does not suit the template; a later one is only refused.
        """
        is_first = self.messages == self._opening
        try:
            self._answer([*self.messages, {"role": "user", "content": text}])
        except UserError as error:
            if is_first:
                raise
            typer.echo(f"tercet: {error}; this message was not sent, and /reset begins anew", err=True)

    def _answer(self, messages: list[Message]) -> None:
        try:
            listed = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {error}") from error
        ids = torch.tensor([listed], device=self._model.device)
        check_room(self._model, ids.shape[1], self._sampling.max_new_tokens)
        cache = self._kept.begin_turn(ids)
        output = stream_continuation(self._model, self._tokenizer, ids, self._sampling, cache)
        self._kept.end_turn(cache, output)
        answer = str(self._tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
