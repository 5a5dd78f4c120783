"""What `generate` and `chat` print: each token's text at once, never half a character, end to end the whole text."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tercet.streaming import TokenPrinter


class Terminal:
    """What was written, write by write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        monkeypatch.setattr(
            "tercet.streaming.typer.echo", lambda text="", nl=True: self.written.append(text + "\n" * nl)
        )


def printed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal(patch)
        printer = TokenPrinter(tokenizer)
        printer.put(torch.tensor([[5, 6, 7]]))  # the prompt
        for id in ids:
            printer.put(torch.tensor([id]))
        printer.end()
    return terminal.written


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_out_whole(small_tokenizer, text):
    written = printed(small_tokenizer, small_tokenizer(text)["input_ids"])
    assert "".join(written) == text + "\n"
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in written)


def test_each_token_is_shown_when_it_comes(small_tokenizer):
    """A word is not held back until its space comes, as transformers' own streamer does."""
    ids = small_tokenizer("The module provides a list")["input_ids"]
    assert printed(small_tokenizer, ids) == [*(small_tokenizer.decode([id]) for id in ids), "\n"]


def test_a_character_of_several_tokens_waits_for_its_last(small_tokenizer):
    ids = small_tokenizer("a\N{SNOWMAN}b")["input_ids"]
    assert len(ids) == 5
    assert printed(small_tokenizer, ids) == ["a", "\N{SNOWMAN}", "b", "\n"]


def test_a_character_that_is_never_finished_is_shown_as_broken(small_tokenizer):
    ids = small_tokenizer("a\N{SNOWMAN}")["input_ids"][:-1]
    assert printed(small_tokenizer, ids) == ["a", "\ufffd\n"]


def test_special_tokens_are_not_shown(small_tokenizer):
    ids = small_tokenizer("yes")["input_ids"]
    assert "".join(printed(small_tokenizer, [2, *ids, 3, 0])) == "yes\n"
