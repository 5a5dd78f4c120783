"""What tokens stand for: text as a reader sees it, and bytes.

Tokenizers spell tokens in three ways inside: byte-level BPE in 256 stand-in characters, SentencePiece with "▁" for a
blank and "<0x0A>" for bytes, others as text. The tokenizer's own decoder says which.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tercet.explorer.record import TokenFacts

_BYTES_OF_STAND_INS = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPELT = "tercet.explorer.spelt"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """For `decode`: a byte that is no UTF-8 as <E4>, since a replacement character would look like any other."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"<{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_SPELT, _spell)


class TokenReader:
    """Reads ids of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        added: dict[str, int] = cast(Any, tokenizer).get_added_vocab()
        self._added = {id: str(token) for token, id in added.items()}
        self._decoders = _decoder_kinds(tokenizer)

    def facts(self, id: int) -> TokenFacts:
        """One token. A special token stands for no text and is shown by its name."""
        if id in self._special:
            return TokenFacts(id, str(self._tokenizer.convert_ids_to_tokens(id)), "", True)
        content = self.content(id)
        return TokenFacts(id, content.decode("utf-8", _SPELT), content.hex(), False)

    def text(self, id: int) -> str:
        """A token's text alone, special or not."""
        return self.facts(id).text

    def content(self, id: int) -> bytes:
        """The bytes that an ordinary token stands for; none for an id that the vocabulary does not have."""
        if id in self._added:
            return self._added[id].encode()
        token = cast(str | bytes | None, self._tokenizer.convert_ids_to_tokens(id))
        if token is None:  # models have more rows than tokens, to round their number up
            return b""
        if isinstance(token, bytes):
            return token
        if "ByteLevel" in self._decoders:
            return _from_stand_ins(token)
        if self._decoders & {"Metaspace", "ByteFallback", "Replace"}:
            byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in self._decoders else None
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return str(self._tokenizer.decode([id], clean_up_tokenization_spaces=False)).encode()


def _from_stand_ins(token: str) -> bytes:
    if all(character in _BYTES_OF_STAND_INS for character in token):
        return bytes(_BYTES_OF_STAND_INS[character] for character in token)
    return token.encode()


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of the steps by which a fast tokenizer decodes; none of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    found: set[str] = set()
    todo: list[Any] = [json.loads(backend.to_str()).get("decoder")]
    while todo:
        step = todo.pop()
        if step:
            found.add(step["type"])
            todo += step.get("decoders", [])
    return found


def read_tokens(reader: TokenReader, ids: Sequence[int], prompt: str, num_prompt_tokens: int) -> tuple[TokenFacts, ...]:
    """Facts of a run's tokens, without the blank that SentencePiece puts before a text and the prompt does not have."""
    facts = [reader.facts(id) for id in ids]
    spelt = "".join(token.bytes for token in facts[:num_prompt_tokens])
    if spelt == "20" + prompt.encode().hex():
        index = next(index for index, token in enumerate(facts) if token.bytes)
        first = bytes.fromhex(facts[index].bytes)[1:]
        facts[index] = TokenFacts(facts[index].id, first.decode("utf-8", _SPELT), first.hex(), False)
    return tuple(facts)


def stands_for(tokens: Iterable[TokenFacts], text: str) -> bool:
    """Whether tokens spell a text exactly; not where a tokenizer normalises it (case, accents, blanks)."""
    return "".join(token.bytes for token in tokens) == text.encode().hex()
