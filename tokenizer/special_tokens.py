"""The tokens that no text produces by itself, and the ids they hold in every Tercet tokenizer."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
"""Ends every document; also what generation starts from when there is no prompt. bos and eos are this one token."""

PADDING = "<|pad|>"
"""Distinct from the end of text: were they one token, masking padding out of the labels would hide every ending."""

MESSAGE_START = "<|im_start|>"
"""Opens a message; the role follows on the same line."""

MESSAGE_END = "<|im_end|>"
"""Closes a message."""

SPECIAL_TOKENS = (END_OF_TEXT, PADDING, MESSAGE_START, MESSAGE_END)
"""In the order of their ids, 0 to 3: first, so that they stay put whatever the size of the vocabulary."""


class TokenIds(NamedTuple):
    """The ids that training needs of a tokenizer; also fields of a model's config."""

    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int

    def for_rows(self) -> dict[str, int]:
        """The two that rows of tokens are made with."""
        return {"eos_token_id": self.eos_token_id, "pad_token_id": self.pad_token_id}


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all special tokens, which no text encodes to."""
    return sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)


def token_ids(tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """A tokenizer's special ids, whole numbers each; where it has no padding token, end of text serves as one.

    Raises:
        ValueError: If the tokenizer has no end-of-text token.
    """
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    if not isinstance(eos, int):
        raise ValueError("the tokenizer has no end-of-text token (eos_token): set one, and save the tokenizer again")
    return TokenIds(bos if isinstance(bos, int) else None, eos, pad if isinstance(pad, int) else eos)
