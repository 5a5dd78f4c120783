"""`tercet chat`: turns of a conversation through the checkpoint's chat template."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import typer
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

from tercet.caches import FULL, KeptCache, compile_decode, make_cache, quantization_named
from tercet.generation import CacheOptions, Sampling, stream_continuation
from tercet.hub_checkpoints import local_checkpoint
from tercet.loading import load_checkpoint_folder
from tercet.training.chat_turns import end_where_turns_end
from tercet.training.errors import UserError

Message = dict[str, str]

_HELP = (
    "Type a message; /reset forgets the conversation, /system TEXT begins one with a system message, /quit leaves. "
    "Ctrl-C stops an answer."
)


def run_chat(
    checkpoint: Path, system: str | None, sampling: Sampling, options: CacheOptions, device: str | None
) -> None:
    """Read a line, answer it, until end of file or /quit."""
    quantization = quantization_named(options.kind or FULL)
    model, tokenizer = load_checkpoint_folder(local_checkpoint(checkpoint), device)
    if not tokenizer.chat_template:
        raise UserError(f"{checkpoint} has no chat template: use `tercet generate` to continue a text")
    is_tuned = _is_tuned_to_chat(model)
    end_where_turns_end(model, tokenizer)
    # Made once before the first line is read, so that options that do not go together are refused now.
    cache = make_cache(model, quantization)
    if options.compile:
        compile_decode(model, cache)
    with _CtrlC() as ctrl_c:
        conversation = Conversation(model, tokenizer, sampling, KeptCache(model, quantization), ctrl_c, system)
        if not is_tuned:
            typer.echo(
                f"note: {checkpoint} was trained on text and never on conversations, so its answers will be text that "
                "goes on; recipe sft (`tercet recipe sft`) tunes it to chat",
                err=True,
            )
        typer.echo(_HELP, err=True)
        _converse(conversation, ctrl_c)


def _is_tuned_to_chat(model: PreTrainedModel) -> bool:
    """Whether its training said so: a Tercet model that has learned to end its turns stops at more than one token."""
    if model.config.model_type != "tercet" or model.generation_config is None:
        return True  # of others only their makers know
    return isinstance(model.generation_config.eos_token_id, list)


def _converse(conversation: "Conversation", ctrl_c: "_CtrlC") -> None:
    for line in _lines(ctrl_c):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.begin_with(rest.strip() or None)
        elif re.fullmatch(r"/[a-z]+", command):
            typer.echo(f"tercet: there is no {command}. {_HELP}", err=True)
        else:
            conversation.answer(line)


def _lines(ctrl_c: "_CtrlC") -> Iterator[str]:
    """What the user types, or a script pipes in, without blank lines; the prompt is shown to a person only."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):  # not everywhere
            import readline  # noqa: F401 (lets `input` edit the line, and bring earlier ones back)
    while True:
        try:
            with ctrl_c.interrupting():
                line = input("> " if is_typed else "").strip()
        except EOFError:
            if is_typed:
                typer.echo("", err=True)
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            typer.echo("\n/quit or Ctrl-D leaves.", err=True)
            continue
        except UnicodeDecodeError as error:
            raise UserError(f"what is piped in is not UTF-8 (byte {error.start} of a line): convert it") from error
        if line:
            yield line


class _CtrlC(StoppingCriteria):
    """Ctrl-C ends an answer behind the token at hand, so that the cache stays whole, or interrupts what is typed.

    A second one does not wait for the token at hand, which may be a long prompt's first. One that comes too late, when
    the answer has just ended, does nothing.
    """

    def __init__(self) -> None:
        self._interrupts = self._is_answering = self._is_asked = False

    def __enter__(self) -> "_CtrlC":
        self._earlier = None
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be received
            self._earlier = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self._earlier is not None:
            signal.signal(signal.SIGINT, self._earlier)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts or self._is_asked:
            self._interrupts = False  # one that follows at once would find Python amid the first
            raise KeyboardInterrupt
        self._is_asked = self._is_answering

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, Ctrl-C raises KeyboardInterrupt."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside, Ctrl-C ends a generation that has this as a criterion."""
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = self._is_asked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Whether to end each of the sequences (B, T), bool (B,)."""
        return torch.full((len(input_ids),), self._is_asked, device=input_ids.device, dtype=torch.bool)


class Conversation:
    """Messages so far, and the cache of what the model has read of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        sampling: Sampling,
        kept: KeptCache,
        ctrl_c: _CtrlC,
        system: str | None = None,
    ) -> None:
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._kept, self._ctrl_c = kept, ctrl_c
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

        Ctrl-C ends it; what was said until then is the answer. A message that the template or the model's longest
        context refuses is not sent, which is said in one line.

        Raises:
            UserError: The template refuses the very first message: it would refuse every other.
        """
        is_first = self.messages == self._opening
        try:
            messages, ids, sampling = self._with_room([*self.messages, {"role": "user", "content": text}])
        except UserError as error:
            if is_first and isinstance(error, _TemplateRefusesError):
                raise
            typer.echo(f"tercet: {error}; this message was not sent, and /reset begins anew", err=True)
            return
        cache = self._kept.begin_turn(ids)
        with suppress(KeyboardInterrupt), self._ctrl_c.stopping():
            output = stream_continuation(self._model, self._tokenizer, ids, sampling, cache, stop=self._ctrl_c)
            self._kept.end_turn(cache, output)
            answer = self._tokenizer.decode(
                output[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            self.messages = [*messages, {"role": "assistant", "content": str(answer)}]
            return
        typer.echo("\ntercet: stopped before the answer; this message is forgotten", err=True)

    def _with_room(self, messages: list[Message]) -> tuple[list[Message], torch.Tensor, Sampling]:
        """The messages that fit with an answer into the longest context, their ids (1, T), and how long it may be.

        The oldest turns go first, never the system message. A quarter of the context is kept for the answer, less where
        fewer tokens were asked for.
        """
        ids = self._ids(messages)
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest is None:
            return messages, ids, self._sampling
        first = len(self._opening)
        reserved = min(self._sampling.max_new_tokens, longest // 4)
        num_dropped = 0
        while ids.shape[1] + reserved > longest and len(messages) > first + 1:
            # A question and its answer.
            messages = messages[:first] + messages[first + 2 :]
            num_dropped += 2
            ids = self._ids(messages)
        room = longest - ids.shape[1]
        if room < 1:
            raise UserError(f"{ids.shape[1]} tokens do not fit into the model's {longest}: shorten the message")
        if num_dropped:
            typer.echo(
                f"note: the model reads at most {longest} tokens; the oldest {num_dropped} messages are forgotten",
                err=True,
            )
        return messages, ids, replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, room))

    def _ids(self, messages: list[Message]) -> torch.Tensor:
        try:
            listed = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise _TemplateRefusesError(f"the chat template refuses the conversation: {error}") from error
        return torch.tensor([listed], device=self._model.device)


class _TemplateRefusesError(UserError):
    """The chat template raised."""
