"""`tercet chat`: what it answers is what a conversation without a kept cache answers, and only new tokens are read."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tercet.modeling import GroupedIntegers, TercetConfig, TercetForCausalLM, TercetSlidingLayer, count_common_tokens

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.3}  # fmt: skip
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MODELS = {
    "tercet": lambda: TercetForCausalLM(TercetConfig(**SIZES)),
    "tercet, sliding": lambda: TercetForCausalLM(TercetConfig(**SIZES, **HALF_SLIDING)),
    "tercet, learned positions": lambda: TercetForCausalLM(TercetConfig(**SIZES, position_embedding_type="learned")),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
}  # fmt: skip
NUM_NEW = 30


@pytest.fixture
def chat(tercet, monkeypatch, fed):
    """Says these lines; returns what was shown, and the ids of each call of the model."""

    def run(folder, lines, *options):
        waiting = iter([*lines, "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(waiting))
        fed.clear()
        shown = tercet("chat", folder, "--temperature", 0, "--max-new-tokens", NUM_NEW, *options)
        return shown, [*fed]

    return run


@pytest.fixture
def chat_without_keeping(chat, monkeypatch):
    """As `chat`, every turn beginning with an empty cache."""

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr("tercet.caches.KeptCache.end_turn", lambda *anything: None)
            return chat(*arguments)

    return run


def turns_of(calls):
    """The calls of each turn: prompt or new part of it, then the tokens one by one. Prompts are longer than one."""
    turns = []
    for ids in calls:
        if len(ids) > 1:
            turns.append([])
        turns[-1].append(ids)
    return turns


def expected_to_be_fed(turns):
    """How much of each turn's prompt is new, given the calls of a conversation without keeping."""
    held, counts = [], []
    for prompt, *tokens in turns:
        common = min(count_common_tokens(torch.tensor([held]), torch.tensor([prompt])), len(prompt) - 1)
        counts.append(len(prompt) - common)
        held = prompt + [ids[0] for ids in tokens]
    return counts


@pytest.mark.parametrize("options", [(), ("--cache", "int8"), ("--cache", "int4")], ids=["full", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_only_new_tokens_are_read_and_the_answers_stay(chat, chat_without_keeping, untrained, name, options):
    if options and not name.startswith("tercet"):
        pytest.skip("int8 and int4 are Tercet's own")
    torch.manual_seed(0)
    folder = untrained(MODELS[name]())
    lines = ["hello", "what is a string?", "and a longer message, of several words, about nothing", "bye"]
    plain, plain_calls = chat_without_keeping(folder, lines, *options)
    kept, kept_calls = chat(folder, lines, *options)
    assert plain.code == kept.code == 0, kept.err
    assert kept.out == plain.out
    plain_turns, kept_turns = turns_of(plain_calls), turns_of(kept_calls)
    expected = expected_to_be_fed(plain_turns)
    assert [len(turn[0]) for turn in kept_turns] == expected
    assert sum(expected) < 0.7 * sum(len(turn[0]) for turn in plain_turns)
    assert [len(turn) for turn in kept_turns] == [len(turn) for turn in plain_turns]


def test_a_cache_that_cannot_go_back_is_made_anew(chat, chat_without_keeping, untrained, monkeypatch):
    torch.manual_seed(0)
    folder = untrained(MODELS["tercet, sliding"]())
    # An answer longer than the slack of 64, read back as other tokens, and no recording of what leaves the window.
    monkeypatch.setattr(TercetSlidingLayer, "activate_past_recording", lambda layer: None)
    lines, options = ["hello", "again"], ("--max-new-tokens", 200)
    plain, plain_calls = chat_without_keeping(folder, lines, *options)
    kept, kept_calls = chat(folder, lines, *options)
    assert kept.code == 0, kept.err
    assert kept.out == plain.out
    assert kept_calls == plain_calls


def test_keys_that_depend_on_the_length_are_not_kept(chat, chat_without_keeping, untrained):
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = TercetConfig(**SIZES, rope_parameters=rope, max_position_embeddings=32)
    folder = untrained(TercetForCausalLM(config))
    lines = ["hello", "what is a string?"]
    assert chat(folder, lines)[1] == chat_without_keeping(folder, lines)[1]


def test_reset_begins_anew(chat, untrained):
    torch.manual_seed(0)
    folder = untrained(MODELS["tercet"]())
    _, calls = chat(folder, ["hello", "something else", "/reset", "hello"])
    first, _, last = turns_of(calls)
    assert last == first


def test_system_begins_anew_with_its_message(chat, untrained):
    torch.manual_seed(0)
    folder = untrained(MODELS["tercet"]())
    _, by_option = chat(folder, ["hello"], "--system", "Be brief.")
    _, by_line = chat(folder, ["something", "/system Be brief.", "hello", "/reset", "hello", "/system", "hello"])
    turns = turns_of(by_line)
    assert turns[1] == turns[2] == turns_of(by_option)[0]
    _, without = chat(folder, ["hello"])
    assert turns[3] == turns_of(without)[0]


def test_the_kind_of_cache_is_used(chat, checkpoint, monkeypatch):
    bits, encode = set(), GroupedIntegers.encode
    monkeypatch.setattr(GroupedIntegers, "encode", lambda codec, states: bits.add(codec.bits) or encode(codec, states))
    assert chat(checkpoint, ["hello"], "--cache", "int4")[0].code == 0
    assert bits == {4}


def test_compiled_answers_are_the_same(chat, untrained, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "tercet.modeling.decode_tercet._compile", lambda step: lambda *arguments: steps.append(1) or step(*arguments)
    )
    torch.manual_seed(0)
    folder, lines = untrained(MODELS["tercet"]()), ["hello", "what is a string?"]
    plain, compiled = chat(folder, lines)[0], chat(folder, lines, "--compile")[0]
    assert compiled.out == plain.out
    assert len(steps) > NUM_NEW
    assert "half a minute" in compiled.err


class TestNoRoom:
    """A conversation longer than the model's context forgets its oldest turns, and never its system message."""

    @pytest.fixture
    def folder(self, untrained):
        torch.manual_seed(0)
        config = TercetConfig(**SIZES, position_embedding_type="learned", max_position_embeddings=100)
        return untrained(TercetForCausalLM(config))

    def test_the_oldest_turns_are_forgotten(self, chat_without_keeping, folder):
        shown, calls = chat_without_keeping(folder, ["first", "second", "third"], "--system", "Be brief.")
        assert shown.code == 0, shown.err
        assert "at most 100 tokens; the oldest 2 messages are forgotten" in shown.err
        tokenizer = AutoTokenizer.from_pretrained(folder)
        last = tokenizer.decode(turns_of(calls)[-1][0])
        assert "third" in last and "<|im_start|>user\nfirst" not in last
        assert last.startswith("<|im_start|>system\nBe brief.<|im_end|>")
        assert max(sum(len(ids) for ids in turn) for turn in turns_of(calls)) <= 100

    def test_answers_after_forgetting_are_those_of_what_is_left(self, chat, chat_without_keeping, folder):
        lines = ["first", "second", "third", "fourth"]
        kept, _ = chat(folder, lines)
        plain, calls = chat_without_keeping(folder, lines)
        assert kept.out == plain.out
        assert kept.err.count("are forgotten") >= 2
        for prompt, *tokens in turns_of(calls):
            assert len(prompt) + len(tokens) <= 100

    def test_an_answer_is_as_long_as_there_is_room(self, chat, folder):
        # Without a row of its own in the tied head, no end is ever the likeliest token.
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][:4] = 0
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        shown, calls = chat(folder, ["hello"], "--max-new-tokens", 500)
        assert shown.code == 0, shown.err
        ((prompt, *tokens),) = turns_of(calls)
        assert len(prompt) + len(tokens) + 1 == 100  # the last one is shown and not read

    def test_a_message_that_is_too_long_is_not_sent(self, chat, folder):
        shown, calls = chat(folder, ["a message that is too long " * 9, "hello"])
        assert shown.code == 0, shown.err
        assert "do not fit into the model's 100: shorten the message" in shown.err
        assert len(turns_of(calls)) == 1


def test_a_template_without_system_messages_says_so(chat, untrained):
    folder = untrained(MODELS["tercet"]())
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    shown, _ = chat(folder, ["hello"])
    assert shown.code == 2
    assert "System role not supported" in shown.err
