"""Conversations to text through a chat template, with the parts that the model is to write marked as labels.

Special tokens come from the template alone: where a message itself says "<|im_end|>", that is plain text. So the
rendered text is cut at every special token of the template, and of what lies between nothing can become one.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, cast

from tercet.training.documents import DataError, Segment
from tercet.training.skips import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, which Unicode keeps for use inside a program
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_CHAT_REMEDY = "Mend or remove the row."
_TEMPLATE_REMEDY = "Put {% generation %} and {% endgeneration %} around what the assistant writes in the chat template."


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes text.

    Attributes:
        template: Jinja source, as `transformers` reads it.
        special_tokens: Names of the tokens that only the template may write.
        variables: What a template may read beside the messages: `bos_token`, `eos_token` and their like.
    """

    template: str
    special_tokens: tuple[str, ...]
    variables: Mapping[str, Any]

    @classmethod
    def of_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """The format that a tokenizer carries.

        Raises:
            DataError: If it has no chat template.
        """
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                "The tokenizer has no chat template, which messages_column needs. Set tokenizer.chat_template and save "
                "it again, or let Tercet train a tokenizer."
            ) from error
        special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        return cls(template, special, dict(tokenizer.special_tokens_map))

    @cached_property
    def special_pattern(self) -> str:
        """Regular expression of a special token's name, the longest first; matches nothing where there is none."""
        return "|".join(re.escape(name) for name in sorted(self.special_tokens, key=len, reverse=True)) or "(?!)"

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself says what the assistant writes."""
        return _GENERATION.search(self.template) is not None


@cache
def tercet_chat_format() -> ChatFormat:
    """The format of every tokenizer that Tercet trains; known before one is trained."""
    from tercet.tokenizer.special_tokens import END_OF_TEXT, PADDING, SPECIAL_TOKENS

    template = resources.files("tercet.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}
    return ChatFormat(template, SPECIAL_TOKENS, names)


def render_messages(messages: Any, chat: ChatFormat) -> tuple[Segment, ...]:
    """A conversation in segments: each special token of the template is one, and no label shares one with another text.

    What the assistant writes is found by the template's own `{% generation %}` marks. Without them, an assistant's
    message is what rendering one message more adds to the generation prompt, as long as every such beginning is also
    the beginning of the whole.

    Args:
        messages: [{"role": ..., "content": ...}, ...], or ShareGPT's [{"from": ..., "value": ...}, ...].
        chat: Of the tokenizer that will encode the segments.

    Raises:
        RowError: If this is no conversation, the template refuses it, the assistant's part cannot be told from the
            rest, or the assistant says nothing (reason "no_label").
    """
    messages = _with_roles(messages)
    _check_messages(messages)
    marks, marked = _mark_special_tokens(messages, chat)
    if chat.marks_generation:
        rendered, spans = _render(marked, chat, with_spans=True)
    else:
        rendered, _ = _render(marked, chat)
        spans = list(_spans_by_prefix(marked, rendered, chat))
    if not any(start < stop for start, stop in spans):
        raise RowError("no_label", "has no message of the assistant", "Remove the row.")
    return tuple(_segments(rendered, spans, marks, chat))


def _with_roles(messages: Any) -> Any:
    """ShareGPT's keys and names as those of chat templates; everything else as it is."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"from", "value"} <= m.keys() for m in messages
    ):
        return messages
    return [{"role": _SHAREGPT_ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in messages]


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise RowError(
            "wrong_type",
            f"holds a {type(messages).__name__}, not a list of messages",
            "Set messages_column to a column of [{role, content}, ...].",
        )
    if not messages:
        raise RowError("empty", "holds an empty conversation", "Remove the row.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            found = ", ".join(map(repr, message)) if isinstance(message, dict) else type(message).__name__
            raise RowError(
                "wrong_type",
                f"has a message {index} without a 'role' ({found})",
                "Write messages as {role, content}.",
            )


def _mark_special_tokens(messages: list[Any], chat: ChatFormat) -> tuple[str, list[Any]]:
    """Two marks that occur nowhere in the messages, and the messages with each special token's name between them.

    Only the names are marked, not whole messages: a template may trim or split a message. Without a name there are no
    marks ("") and the messages are the same.
    """
    special = re.compile(chat.special_pattern)
    texts = list(_strings(messages))
    if not any(special.search(text) for text in texts):
        return "", messages
    free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
    if len(free) < 2:
        raise RowError("chat", "holds 31 or more of Unicode's noncharacters U+FDD0 to U+FDEF", _CHAT_REMEDY)
    opening, closing = free[:2]
    return opening + closing, _replaced(messages, lambda match: f"{opening}{match[0]}{closing}", special)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, replacement: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(replacement, value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, replacement, pattern) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(item, replacement, pattern) for item in value]
    return value


def _render(
    messages: list[Any], chat: ChatFormat, *, with_spans: bool = False, add_generation_prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    # As `apply_chat_template` does: many a template writes a null as "None".
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        rendered, spans = _renderer()(
            conversations=[present],
            chat_template=chat.template,
            return_assistant_tokens_mask=with_spans,
            add_generation_prompt=add_generation_prompt,
            **chat.variables,
        )
    except Exception as error:  # a template is a program: it may fail in any way
        problem = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise RowError("chat", f"is refused by the chat template: {problem}", _CHAT_REMEDY) from error
    return rendered[0], list(spans[0]) if with_spans else []


@cache
def _renderer() -> Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    return cast(Any, render_jinja_template)


def _spans_by_prefix(messages: list[Any], rendered: str, chat: ChatFormat) -> Iterator[tuple[int, int]]:
    special_then_space = re.compile(rf"({chat.special_pattern})\s+\Z")
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = _render(messages[:index], chat, add_generation_prompt=True)
        until, _ = _render(messages[: index + 1], chat)
        if not (rendered.startswith(until) and until.startswith(before)):
            raise RowError(
                "chat",
                f"has an assistant's message ({index}) that the chat template writes in another way when more "
                f"messages follow, or not behind its generation prompt, so that its tokens cannot be told",
                _TEMPLATE_REMEDY,
            )
        stop = len(until)
        # The line end behind the token that ends a message is the template's; the model stops at that token.
        if closing := special_then_space.search(until, len(before)):
            stop = closing.end(1)
        yield len(before), stop


def _segments(rendered: str, spans: list[tuple[int, int]], marks: str, chat: ChatFormat) -> Iterator[Segment]:
    """Cut the rendered text at special tokens and at the ends of spans; what is neither is joined to one segment."""
    starts, stops = sorted(start for start, _ in spans), sorted(stop for _, stop in spans)
    bounds = sorted(starts + stops)
    plain, plain_is_label = "", False
    for start, text, is_template in _pieces(rendered, marks, chat):
        stop = start + len(text)
        cuts = [start, *bounds[bisect_right(bounds, start) : bisect_left(bounds, stop)], stop]
        for first, last in pairwise(cuts):
            is_label = bisect_right(starts, first) > bisect_right(stops, first)
            if plain and (is_template or is_label != plain_is_label):
                yield Segment(plain, is_template=False, is_label=plain_is_label)
                plain = ""
            if is_template:
                yield Segment(rendered[first:last], is_template=True, is_label=is_label)
            else:
                plain, plain_is_label = plain + rendered[first:last], is_label
    if plain:
        yield Segment(plain, is_template=False, is_label=plain_is_label)


def _pieces(rendered: str, marks: str, chat: ChatFormat) -> Iterator[tuple[int, str, bool]]:
    """(position in the rendered text, text, whether it is a special token of the template); marks are left out."""
    special = chat.special_pattern
    # A mark that lost its partner, as a template that splits messages leaves it, is left out as well.
    lone_marks = f"|[{marks}]" if marks else ""
    marked = f"{marks[0]}(?P<said>{special}){marks[1]}|" if marks else ""
    at = 0
    for match in re.finditer(f"{marked}(?P<template>{special}){lone_marks}", rendered):
        if match.start() > at:
            yield at, rendered[at : match.start()], False
        if match["template"] is not None:
            yield match.start(), match[0], True
        elif marks and match["said"] is not None:
            yield match.start() + 1, match["said"], False
        at = match.end()
    if at < len(rendered):
        yield at, rendered[at:], False
