"""The tokens that no text produces by itself, and the ids they hold in every Tercet tokenizer."""

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
