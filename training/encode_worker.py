"""Pieces of text to token ids; run as a program, a worker that does so for the process that started it.

A worker is started by the path of this file. It imports numpy and tokenizers and nothing of Tercet, so that it is there
in a tenth of a second, and takes the memory of its tokenizer and its chunks alone. It ends when its standard input
does: a preparation that is killed leaves no worker behind.
"""

import os
import pickle
import re
import signal
import sys
from array import array
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

_MAX_KEPT_CHARS = 40  # longer chunks are seldom seen again
_GENERATION_CHUNKS = 1 << 18  # some 200 bytes each, and there are two generations


class Encoder:
    """A tokenizer of one's own, which cuts nothing short and pads nothing, and the ids of the chunks it has met.

    Used by one thread at a time.
    """

    def __init__(self, state: str, dtype: str, chunking: tuple[str, str, str] | None) -> None:
        """
        Args:
            state: What `Tokenizer.to_str()` gives.
            dtype: Of the ids.
            chunking: What `tercet.tokenizer.chunking` says of this tokenizer.
        """
        self.backend = Tokenizer.from_str(state)
        self.backend.no_truncation()
        self.backend.no_padding()
        self._dtype = np.dtype(dtype)
        self._chunk_ids = None
        if chunking is not None:
            pattern, prefixes, word = chunking
            self._find_chunks = re.compile(pattern).findall
            self._chunk_ids = ChunkIds(self.backend, self._dtype, prefixes, word)

    def text_ids(self, pieces: Sequence[str]) -> list[bytes]:
        """Ids of each piece as they lie in memory; special tokens' names are plain text."""
        self.backend.encode_special_tokens = True
        if self._chunk_ids is None:
            return self._whole(pieces)
        ids_of = self._chunk_ids.__getitem__
        return [b"".join(map(ids_of, self._find_chunks(piece))) for piece in pieces]

    def template_ids(self, pieces: Sequence[str]) -> list[bytes]:
        """The same where special tokens' names are those tokens."""
        self.backend.encode_special_tokens = False
        return self._whole(pieces)

    def gather(self, ids: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all pieces, end to end, (tokens,), and how many each has, int64 (pieces,)."""
        num_bytes = np.array([len(of_piece) for of_piece in ids], dtype=np.int64)
        return np.frombuffer(b"".join(ids), self._dtype), num_bytes // self._dtype.itemsize

    def _whole(self, pieces: Sequence[str]) -> list[bytes]:
        encodings = self.backend.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype).tobytes() for encoding in encodings]


class ChunkIds(dict[str, bytes]):
    """Ids of chunks, found by `[]`, which makes those that are not there.

    Two generations bound the memory: when the young one is full it becomes the old one, and what is met again from
    there is young again. So the words in use stay, whatever has come before, and rare ones go.
    """

    def __init__(self, backend: Tokenizer, dtype: np.dtype, prefixes: str, word: str) -> None:
        super().__init__()
        self._encode, self._encode_word, self._prefixes = backend.encode, backend.model.tokenize, prefixes
        self._is_word = re.compile(word).fullmatch
        self._typecode = dtype.char
        self._byte_characters = _byte_characters()
        self._old: dict[str, bytes] = {}

    def __missing__(self, chunk: str) -> bytes:
        ids = self._old.pop(chunk, None)
        if ids is None:
            ids = self._make(chunk)
        if len(chunk) <= _MAX_KEPT_CHARS:
            if len(self) >= _GENERATION_CHUNKS:
                self._old = dict(self)
                self.clear()
            self[chunk] = ids
        return ids

    def _make(self, chunk: str) -> bytes:
        # Of one word: the model itself, without splitting and all that an Encoding has beside the ids, takes less than
        # half the time.
        if chunk.isalpha() or (chunk[0] in self._prefixes and chunk[1:].isalpha()) or self._is_word(chunk):
            word = chunk.encode().decode("latin-1").translate(self._byte_characters)
            return array(self._typecode, [token.id for token in self._encode_word(word)]).tobytes()
        return array(self._typecode, self._encode(chunk, add_special_tokens=False).ids).tobytes()


def _byte_characters() -> dict[int, str]:
    """Byte-level BPE's character for each byte: itself where it is visible in Latin-1, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def encode_pieces(
    encoder: Encoder, pieces: Sequence[str], is_template: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all pieces, end to end, and how many each has.

    Args:
        encoder: Used by no other thread meanwhile.
        pieces: Without lone surrogates.
        is_template: Whether special tokens' names in the piece are those tokens; otherwise they are plain text.

    Returns:
        Ids, (tokens,), read-only, and counts, int64 (pieces,).
    """
    if not any(is_template):
        return encoder.gather(encoder.text_ids(pieces))
    by_piece = [b""] * len(pieces)
    for template, encode in ((False, encoder.text_ids), (True, encoder.template_ids)):
        chosen = [index for index, is_one in enumerate(is_template) if bool(is_one) is template]
        for index, ids in zip(chosen, encode([pieces[index] for index in chosen]), strict=True):
            by_piece[index] = ids
    return encoder.gather(by_piece)


def main() -> None:
    """Serve: what `Encoder` takes comes first, then pieces; pickled, each answered in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the input
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not stand between answers
    encoder = Encoder(*pickle.load(requests))
    while True:
        try:
            pieces, is_template = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = encode_pieces(encoder, pieces, is_template)
        except Exception as error:  # reported where it can be seen
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
