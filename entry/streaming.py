"""Text on the terminal as its tokens come, each as soon as it is whole characters."""

import torch
import typer
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenPrinter(BaseStreamer):
    """Prints what `generate()` makes, without the prompt and without special tokens.

    A character may be several tokens: text that ends within one waits for its rest. All that is printed is, end to end,
    what the tokenizer makes of all tokens at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._is_prompt = True
        self._ids: list[int] = []
        # Tokens before `_context` are printed and no longer looked at; those up to `_printed` are printed, and decoded
        # again with what comes, as a decoder may write a token in another way behind others.
        self._context = self._printed = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (1, T) first, then each new token (1,)."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += value.flatten().tolist()
        before, text = self._decode(self._printed), self._decode(len(self._ids))
        if len(text) > len(before) and not text.endswith(_UNFINISHED):
            typer.echo(text[len(before) :], nl=False)
            self._context, self._printed = self._printed, len(self._ids)

    def end(self) -> None:
        """Print what waits, a character that was never finished, and end the line."""
        typer.echo(self._decode(len(self._ids))[len(self._decode(self._printed)) :])
        self._is_prompt, self._ids, self._context, self._printed = True, [], 0, 0

    def _decode(self, stop: int) -> str:
        ids = self._ids[self._context : stop]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
