"""Which part of the text validates: by hash of a document, or the last part of each document.

Both are functions of the text alone, so that a document stays where it is when the corpus grows or is read in another
order, and equal documents never stand on both sides.
"""

import hashlib

DIGEST_BYTES = 16


def document_digest(text: str) -> bytes:
    """16 bytes that stand for the text: equal for equal texts, on any machine, in any process.

    Raises:
        UnicodeEncodeError: If the text holds a lone surrogate, which no UTF-8 can carry.
    """
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest()


def is_validation(text: str, fraction: float) -> bool:
    """Whether this document validates; true for about `fraction` of all documents, always the same ones.

    A larger fraction keeps every document that a smaller one chose.

    Raises:
        ValueError: If fraction is not in [0, 1).
    """
    return digest_is_validation(document_digest(text), fraction)


def digest_is_validation(digest: bytes, fraction: float) -> bool:
    """`is_validation` of the text that has this `document_digest`."""
    _check_fraction(fraction)
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def part_of(digest: bytes, num_parts: int) -> int:
    """Which of `num_parts` machines prepares the text of this digest: equal texts come to the same one.

    Independent of `digest_is_validation`, which reads the other half of the digest: every part has its share of both
    splits.
    """
    return int.from_bytes(digest[8:], "big") % num_parts


def split_tail(text: str, fraction: float) -> tuple[str, str]:
    """The text before and after the place where its last `fraction` begins, in characters; nothing is lost between.

    Raises:
        ValueError: If fraction is not in [0, 1).
    """
    _check_fraction(fraction)
    cut = int(len(text) * (1.0 - fraction))
    return text[:cut], text[cut:]


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"validation_fraction must be at least 0 and less than 1, not {fraction}.")
