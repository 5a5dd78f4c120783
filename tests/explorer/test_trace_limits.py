"""What a trace cannot hold, what it refuses, and that the model is afterwards as it was."""

import copy
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from traced_models import PROMPT, WINDOW, make_model
from transformers import PreTrainedTokenizerFast

from tercet.explorer import trace
from tercet.explorer.words import sentence
from tercet.training.errors import UserError


def left_out(run):
    return {note.part: sentence("page", f"reason.{note.reason}", note.values) for note in run.left_out}


def missing(run):
    learned = {"rotary_angles", "position_embeddings"}
    return {name for name, tensor in vars(run.activations).items() if tensor is None} - learned


class TestLeftOut:
    @pytest.mark.parametrize("kind", ["falcon", "bloom"])
    def test_a_family_without_the_attention_interface_shows_no_queries(self, record, kind):
        run = record(kind).trace
        assert missing(run) == {"queries", "mlp_gates"}
        assert "attention interface" in left_out(run)["queries"]
        parts = run.activations
        assert torch.allclose(parts.attentions.sum(-1), torch.ones(()), atol=1e-5)
        assert not parts.attentions.triu(1).any()
        summed = parts.hidden[0] + (parts.attention_outputs + parts.mlp_outputs).cumsum(0)
        assert torch.allclose(summed, parts.hidden[1:], atol=1e-4)

    def test_experts(self, record):
        run = record("mixtral").trace
        assert missing(run) == {"mlp_activations", "mlp_gates", "mlp_ups"}
        assert left_out(run).keys() == {"mlp_activations", "mlp_ups", "weight_bytes_read"}
        assert "experts" in left_out(run)["mlp_ups"]
        assert {layer.mlp for layer in run.model.layers} == {"experts"}
        summed = run.activations.hidden[0] + (run.activations.attention_outputs + run.activations.mlp_outputs).sum(0)
        assert torch.allclose(summed, run.activations.hidden[-1], atol=1e-4)

    def test_an_mlp_that_is_not_told_by_a_known_activation(self, small_tokenizer):
        model = make_model("llama")
        model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
        run = trace(model, small_tokenizer, "The string", new_tokens=1, timing_s=0.0)
        assert missing(run) == {"mlp_gates", "mlp_ups"}
        assert "activation(gate)" in left_out(run)["mlp_ups"]
        assert [layer.mlp for layer in run.model.layers] == ["gated", "unknown", "gated"]
        assert not run.model.activation_is_seen

    def test_rows_that_end_in_a_sink(self, record):
        run = record("gpt_oss").trace
        assert "sink" in left_out(run)["attentions"]
        assert (run.activations.attentions.sum(-1) < 1).all()

    def test_a_model_without_a_cache(self, record):
        run = record("openai-gpt").trace
        assert run.decode == ()
        assert {"cache", "keys", "values", "queries"} <= left_out(run).keys()
        # Norms stand behind the additions, so what comes out of a block is no sum.
        assert {"attention_outputs", "mlp_outputs"} <= missing(run)
        assert len(run.uncached) == len(run.tokens) - run.num_prompt_tokens
        assert run.activations.attentions is not None

    def test_text_that_the_tokenizer_changes(self, small_tokenizer):
        tokenizer = copy.deepcopy(small_tokenizer)
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        run = trace(make_model("llama"), tokenizer, "THE string", new_tokens=1, timing_s=0.0)
        assert left_out(run).keys() == {"tokens"}


def test_a_window_in_the_config_that_attention_does_not_keep_to_is_not_told(small_tokenizer):
    model = make_model("llama", sliding_window=WINDOW)
    assert model.config.sliding_window == WINDOW
    run = trace(model, small_tokenizer, PROMPT, new_tokens=1, timing_s=0.0)
    assert [layer.window for layer in run.model.layers] == [None] * 3


class TestRefused:
    @pytest.fixture
    def refuses(self, small_tokenizer):
        def check(text, *words, kind="gpt2", **arguments):
            with pytest.raises(UserError) as refused:
                trace(make_model(kind), small_tokenizer, text, timing_s=0.0, **arguments)
            for word in words:
                assert word in str(refused.value)

        return check

    def test_empty_prompt(self, refuses):
        refuses("", "empty")

    def test_no_new_tokens(self, refuses):
        refuses("The", "at least 1", new_tokens=0)

    @pytest.mark.parametrize("kind", ["gpt2", "tercet-modern"])
    def test_prompt_longer_than_the_context(self, refuses, kind, small_tokenizer):
        text = "string " * 200
        num_tokens = 1 + len(small_tokenizer(text)["input_ids"])
        refuses(text, f"{num_tokens} tokens", "96", kind=kind)

    def test_prompt_and_new_tokens_longer_than_the_context(self, refuses):
        refuses("The", "2 prompt tokens", "95 new", "96", "at most 94", new_tokens=95)

    def test_no_attention(self, refuses):
        refuses("The", "MambaForCausalLM", "no attention", kind="mamba")

    def test_no_utf8(self, refuses):
        refuses("caf\udce9", "UTF-8")

    def test_weights_that_are_no_numbers(self, small_tokenizer):
        model = make_model("llama")
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.nan)
        with pytest.raises(UserError, match="not all finite"):
            trace(model, small_tokenizer, "The", timing_s=0.0)


def state(model):
    modules = list(model.modules())
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    weights = [weight.clone() for weight in model.state_dict().values()]
    return hooks, [module.training for module in modules], model.config._attn_implementation, weights


def is_same(before, after):
    return before[:3] == after[:3] and all(torch.equal(*pair) for pair in zip(before[3], after[3], strict=True))


class TestModelAfterwards:
    @pytest.fixture(params=["tercet-modern", "gpt2"])
    def model(self, request):
        model = make_model(request.param).train()
        next(module for name, module in model.named_modules() if name.endswith(".1")).eval()  # a frozen block
        model.set_attn_implementation("eager")
        return model

    def test_as_it_was(self, model, small_tokenizer):
        before = state(model)
        trace(model, small_tokenizer, PROMPT, new_tokens=2, timing_s=0.0)
        assert is_same(before, state(model))

    def test_as_it_was_after_an_error_in_the_middle_of_a_pass(self, model, small_tokenizer):
        class BrokenError(Exception):
            pass

        passes = []

        def break_while_recording(module, args, output):
            passes.append(module)
            if model.config._attn_implementation == "tercet_explorer":
                raise BrokenError

        block = next(module for name, module in model.named_modules() if name.endswith(".1"))
        block.register_forward_hook(break_while_recording)
        before = state(model)
        with pytest.raises(BrokenError):
            trace(model, small_tokenizer, PROMPT, new_tokens=2, timing_s=0.0)
        assert passes
        assert is_same(before, state(model))

    @pytest.mark.parametrize("part", ["counting", "timing", "recording"])
    def test_as_it_was_when_stopped(self, model, small_tokenizer, part):
        def stop(line):
            if line.startswith(part):
                raise KeyboardInterrupt

        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            trace(model, small_tokenizer, PROMPT, new_tokens=2, timing_s=0.0, step=stop)
        assert is_same(before, state(model))


class TestTokens:
    def test_byte_level_tokens_spell_the_text(self, record):
        tokens = record("llama").trace.tokens[: record("llama").trace.num_prompt_tokens]
        assert (tokens[0].is_special, tokens[0].bytes, tokens[0].text) == (True, "", "<|endoftext|>")
        assert bytes.fromhex("".join(token.bytes for token in tokens)) == PROMPT.encode()
        pieces = [token.text for token in tokens if re.fullmatch("<[0-9A-F]{2}>", token.text)]
        assert pieces[:3] == ["<E4>", "<B8>", "<AD>"]  # of 中, which is several tokens
        assert all(not token.is_special for token in tokens[1:])

    def test_unprintable_bytes(self, small_tokenizer):
        text = "\x00\x1b[31m\u202e\x7f"
        run = trace(make_model("gpt2"), small_tokenizer, text, new_tokens=1, timing_s=0.0)
        assert bytes.fromhex("".join(token.bytes for token in run.tokens[: run.num_prompt_tokens])) == text.encode()

    def test_special_tokens_in_the_prompt_are_plain_text(self, small_tokenizer):
        text = "a <|endoftext|> b"
        run = trace(make_model("gpt2"), small_tokenizer, text, new_tokens=1, timing_s=0.0)
        prompt = run.tokens[: run.num_prompt_tokens]
        assert [token.is_special for token in prompt].count(True) == 1
        assert bytes.fromhex("".join(token.bytes for token in prompt)) == text.encode()

    def test_sentencepiece_style(self):
        """As Llama 2's: blanks are ▁, one stands before the text, bytes without a token are <0x..>."""
        pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
        model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True,
                           unk_token="<unk>")  # fmt: skip
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        text = "a b\né a"
        run = trace(make_model("llama"), tokenizer, text, new_tokens=1, timing_s=0.0)
        prompt = run.tokens[: run.num_prompt_tokens]
        assert [token.text for token in prompt] == ["<s>", "a", " ", "b", "\n", "<C3>", "<A9>", " a"]
        assert bytes.fromhex("".join(token.bytes for token in prompt)) == text.encode()
        # The model has more rows than the tokenizer has tokens: they stand for nothing.
        assert {text for id, text in run.vocabulary.items() if id >= len(pieces)} == {""}
