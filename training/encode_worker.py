"""Pieces of text to token ids; run as a program, a worker that does so for the process that started it.

A worker is started by the path of this file. It imports numpy and tokenizers and nothing of Tercet, so that it is there
in a tenth of a second, and takes the memory of its tokenizer alone. It ends when its standard input does: a preparation
that is killed leaves no worker behind.
"""

import os
import pickle
import signal
import sys
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


def load_backend(state: str) -> Tokenizer:
    """A tokenizer of one's own from `Tokenizer.to_str()`; cuts nothing short and pads nothing."""
    backend = Tokenizer.from_str(state)
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode_pieces(
    backend: Tokenizer, pieces: Sequence[str], is_template: Sequence[bool], dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all pieces, end to end, and how many each has.

    Args:
        backend: Used by no other thread meanwhile.
        pieces: Without lone surrogates.
        is_template: Whether special tokens' names in the piece are those tokens; otherwise they are plain text.
        dtype: Of the ids.

    Returns:
        Ids, (tokens,), and counts, int64 (pieces,).
    """
    by_piece: list[np.ndarray] = [np.empty(0, dtype)] * len(pieces)
    for template in (False, True):
        chosen = [index for index, is_one in enumerate(is_template) if bool(is_one) is template]
        if not chosen:
            continue
        backend.encode_special_tokens = not template
        encodings = backend.encode_batch_fast([pieces[index] for index in chosen], add_special_tokens=False)
        for index, encoding in zip(chosen, encodings, strict=True):
            by_piece[index] = np.array(encoding.ids, dtype=dtype)
    counts = np.array([len(ids) for ids in by_piece], dtype=np.int64)
    return (np.concatenate(by_piece) if by_piece else np.empty(0, dtype)), counts


def main() -> None:
    """Serve: a tokenizer's state and a dtype come first, then pieces; pickled, each answered in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the input
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not stand between answers
    state, dtype = pickle.load(requests)
    backend = load_backend(state)
    while True:
        try:
            pieces, is_template = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = encode_pieces(backend, pieces, is_template, dtype)
        except Exception as error:  # reported where it can be seen
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
