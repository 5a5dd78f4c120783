"""What a trace holds is what the model computes: each part against the model's public outputs, or computed anew."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from traced_models import PROMPT, TERCET, WINDOW, make_model
from transformers.activations import ACT2FN

from tercet.explorer import Sampling, trace

# Families whose attention, MLP and residual stream are seen whole.
WHOLE = [*TERCET, "gpt2", "llama", "mistral", "qwen3", "gpt_neox", "gemma2", "phi3", "opt", "granite"]
WINDOWS = {
    "tercet-mixed": (WINDOW, None, WINDOW),
    "mistral": (WINDOW,) * 3,
    "gemma2": (WINDOW, None, WINDOW),
}
OUTPUT_PROJECTIONS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "opt": "model.decoder.layers.{}.self_attn.out_proj",
    "gpt_neox": "gpt_neox.layers.{}.attention.dense",
}


@pytest.fixture(params=WHOLE)
def traced(request, record):
    return record(request.param)


def close(left, right, tolerance=1e-4):
    assert left.shape == right.shape
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


def call(model, ids, **arguments):
    with torch.no_grad():
        # A copy: asking for inner outputs leaves transformers' own hooks behind.
        return copy.deepcopy(model)(ids, **arguments)


def test_nothing_is_left_out(traced):
    assert traced.trace.left_out == ()
    wanted = {"rotary_angles"} if traced.trace.model.positions == "learned" else {"position_embeddings"}
    wanted |= set() if traced.trace.model.layers[0].mlp == "gated" else {"mlp_gates"}
    activations = vars(traced.trace.activations)
    assert {name for name, tensor in activations.items() if tensor is None} == wanted


def test_tokens_are_those_of_generate(traced):
    with torch.no_grad():
        generated = traced.model.generate(
            traced.prompt_ids, attention_mask=torch.ones_like(traced.prompt_ids), max_new_tokens=6, do_sample=False
        )
    assert generated.tolist() == traced.ids.tolist()
    first = traced.trace.num_prompt_tokens
    assert traced.trace.activations.logits[first - 1 : -1].argmax(-1).tolist() == traced.ids[0, first:].tolist()


def test_rows_of_attention_sum_to_one_and_see_no_future_and_no_more_than_the_window(traced):
    attentions = traced.trace.activations.attentions
    num_tokens = traced.ids.shape[1]
    assert attentions.shape == (3, 4, num_tokens, num_tokens)
    assert torch.allclose(attentions.sum(-1), torch.ones(()), atol=1e-5)
    assert not attentions.triu(1).any()
    windows = tuple(layer.window for layer in traced.trace.model.layers)
    assert windows == WINDOWS.get(traced.kind, (None,) * 3)
    assert all(layer.chunk is None for layer in traced.trace.model.layers)
    for layer, window in zip(attentions, windows, strict=True):
        reach = num_tokens if window is None else window
        assert not layer.tril(-reach).any()
        assert layer[:, -1, -reach:].all()


def test_attentions_are_those_of_the_eager_implementation(traced):
    eager = copy.deepcopy(traced.model)
    eager.set_attn_implementation("eager")
    expected = torch.stack(call(eager, traced.ids, output_attentions=True, use_cache=False).attentions)[:, 0]
    assert close(traced.trace.activations.attentions, expected)


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind not in ("gemma2", "granite")])
def test_queries_keys_and_values_give_what_attention_adds(record, kind):
    traced = record(kind)
    parts = traced.trace.activations
    for layer, facts in enumerate(traced.trace.model.layers):
        scale, window = facts.attention_scale, facts.window
        assert scale is not None
        num_groups = parts.queries.shape[1] // parts.keys.shape[1]
        keys, values = (states[layer].repeat_interleave(num_groups, dim=0) for states in (parts.keys, parts.values))
        scores = scale * parts.queries[layer] @ keys.mT
        visible = torch.ones_like(scores, dtype=torch.bool).tril()
        visible = visible if window is None else visible.triu(1 - window)
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
        heads = mixed.transpose(0, 1).flatten(1)
        name = OUTPUT_PROJECTIONS.get(kind, "model.layers.{}.self_attn.o_proj").format(layer)
        with torch.no_grad():
            assert close(traced.model.get_submodule(name)(heads), parts.attention_outputs[layer])


def test_keys_and_values_are_those_of_the_cache(traced):
    cache = call(traced.model, traced.ids, use_cache=True).cache
    for index, layer in enumerate(cache.layers):
        num_held = layer.keys.shape[-2]  # a window's, where attention slides
        assert close(traced.trace.activations.keys[index, :, -num_held:], layer.keys[0])
        assert close(traced.trace.activations.values[index, :, -num_held:], layer.values[0])


def test_residual_stream(traced):
    expected = torch.stack(call(traced.model, traced.ids, output_hidden_states=True).hidden_states)[:, 0]
    hidden = traced.trace.activations.hidden
    assert close(hidden[:-1], expected[:-1])
    norm = {
        "gpt2": "transformer.ln_f",
        "opt": "model.decoder.final_layer_norm",
        "gpt_neox": "gpt_neox.final_layer_norm",
    }
    with torch.no_grad():
        assert close(traced.model.get_submodule(norm.get(traced.kind, "model.norm"))(hidden[-1]), expected[-1])


def test_attention_and_mlp_add_up_to_the_residual_stream(traced):
    parts = traced.trace.activations
    assert close(parts.hidden[0] + (parts.attention_outputs + parts.mlp_outputs).cumsum(0), parts.hidden[1:])


def test_stream_begins_with_the_embeddings(record):
    for kind in ("tercet-modern", "llama", "tercet-classic", "gpt2", "opt"):
        parts = record(kind).trace.activations
        positions = 0 if parts.position_embeddings is None else parts.position_embeddings
        assert torch.equal(parts.embeddings + positions, parts.hidden[0])


def test_mlp_activations_are_contracted_to_what_the_mlp_adds(record):
    names = {"llama": "model.layers.{}.mlp.down_proj", "gpt2": "transformer.h.{}.mlp.c_proj",
             "tercet-classic": "model.layers.{}.mlp.down_proj", "phi3": "model.layers.{}.mlp.down_proj",
             "opt": "model.decoder.layers.{}.fc2"}  # fmt: skip
    for kind, name in names.items():
        traced = record(kind)
        parts = traced.trace.activations
        assert {parts.mlp_activations.shape[-1]} == {layer.mlp_width for layer in traced.trace.model.layers}
        for layer in range(3):
            with torch.no_grad():
                contracted = traced.model.get_submodule(name.format(layer))(parts.mlp_activations[layer])
            assert close(contracted, parts.mlp_outputs[layer])


GATES_AND_UPS = {  # the matrices of a block's MLP by name; of both in one, the halves
    "gpt2": (None, "transformer.h.{}.mlp.c_fc"),
    "opt": (None, "model.decoder.layers.{}.fc1"),
    "gpt_neox": (None, "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
    "tercet-classic": (None, "model.layers.{}.mlp.up_proj"),
    "phi3": ("model.layers.{}.mlp.gate_up_proj", "model.layers.{}.mlp.gate_up_proj"),
}
GATED = ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")


def test_activated_gates_times_ups_are_what_is_contracted(traced):
    activate = ACT2FN[traced.trace.model.activation]
    parts = traced.trace.activations
    made = activate(parts.mlp_ups) if parts.mlp_gates is None else activate(parts.mlp_gates) * parts.mlp_ups
    assert close(made, parts.mlp_activations, tolerance=1e-5)


def test_gates_and_ups_are_those_of_the_matrices_with_these_names(traced):
    seen = {}

    def see(module, args, output):
        seen[module] = output.detach().reshape(traced.ids.shape[1], -1)

    model = copy.deepcopy(traced.model)
    for module in model.modules():
        module.register_forward_hook(see) if hasattr(module, "weight") else None
    with torch.no_grad():
        model(traced.ids, use_cache=False)
    gate, up = GATES_AND_UPS.get(traced.kind, GATED)
    parts = traced.trace.activations
    width = traced.trace.model.layers[0].mlp_width
    for layer in range(3):
        assert close(parts.mlp_ups[layer], seen[model.get_submodule(up.format(layer))][:, -width:])
        if gate is None:
            assert parts.mlp_gates is None
        else:
            assert close(parts.mlp_gates[layer], seen[model.get_submodule(gate.format(layer))][:, :width])


def test_the_gate_is_told_by_what_it_does_not_by_its_turn(record, small_tokenizer):
    class UpFirst(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.first, self.second, self.last = mlp.up_proj, mlp.gate_proj, mlp.down_proj

        def forward(self, states):
            up = self.first(states)
            return self.last(F.silu(self.second(states)) * up)

    traced = record("llama")
    model = make_model("llama")
    for block in model.model.layers:
        block.mlp = UpFirst(block.mlp)
    for changed in (model, copy.deepcopy(model).bfloat16()):
        run = trace(changed, small_tokenizer, PROMPT, new_tokens=6, timing_s=0.0)
        tolerance = 1e-4 if changed is model else 0.05
        first = traced.trace.num_prompt_tokens
        assert close(run.activations.mlp_gates[0, :first], traced.trace.activations.mlp_gates[0, :first], tolerance)
        assert close(run.activations.mlp_ups[0, :first], traced.trace.activations.mlp_ups[0, :first], tolerance)


def test_facts_of_the_model(record):
    def told(kind):
        facts = record(kind).trace.model
        norm, mlp = facts.layers[0].norm_before_attention.label, facts.layers[0].mlp
        return facts.positions, norm, mlp, facts.num_heads, facts.num_key_value_heads, facts.head_dim

    assert told("tercet-modern") == ("rotary", "RMSNorm", "gated", 4, 2, 8)
    assert told("tercet-classic") == ("learned", "LayerNorm", "plain", 4, 4, 8)
    assert told("gpt2") == ("learned", "LayerNorm", "plain", 4, 4, 8)
    assert told("phi3") == ("rotary", "RMSNorm", "gated", 4, 2, 8)
    assert told("qwen3") == ("rotary", "RMSNorm", "gated", 4, 2, 16)
    assert told("bloom") == ("alibi", "LayerNorm", "plain", 4, 4, 8)
    assert record("llama").trace.model.layers[0].mlp_width == 48
    assert record("llama").trace.model.hyperparameters["rope_parameters"]["rope_theta"] == 10000.0


def test_rotary_angles(record):
    parts = record("llama").trace.activations
    angles = torch.arange(parts.hidden.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = torch.cat((angles, angles), dim=-1)
    assert close(parts.rotary_angles, torch.stack((angles.cos(), angles.sin()))[None])
    assert record("gpt_neox").trace.activations.rotary_angles.shape[-1] == 4  # half of a head of 8


def test_weights_are_all_there_and_counted_once(traced):
    weights = traced.trace.model.weights
    assert [weight.name for weight in weights] == [
        name for name, _ in traced.model.named_parameters(remove_duplicate=False)
    ]
    counted = sum(math.prod(weight.shape) for weight in weights if weight.tied_to is None)
    assert counted == traced.trace.model.num_parameters == sum(p.numel() for p in traced.model.parameters())
    parts = {weight.part for weight in weights}
    assert (
        {"embedding", "attention", "mlp", "norm"}
        <= parts
        <= {"embedding", "attention", "mlp", "norm", "positions", "head"}
    )
    assert {weight.layer for weight in weights if weight.part in ("attention", "mlp")} == {0, 1, 2}


def test_tied_head(record):
    head = next(weight for weight in record("tercet-modern").trace.model.weights if weight.part == "head")
    assert (head.name, head.tied_to) == ("lm_head.weight", "model.embed_tokens.weight")
    assert all(weight.tied_to is None for weight in record("llama").trace.model.weights)


def test_losses(traced):
    loss = call(traced.model, traced.ids, labels=traced.ids).loss
    losses = torch.tensor(traced.trace.losses)
    assert close(losses.mean(), loss)
    prompt_loss = call(traced.model, traced.prompt_ids, labels=traced.prompt_ids).loss
    num_bytes = len(PROMPT.encode())  # the start token is none of the text, and has no loss
    bits = prompt_loss.item() * (traced.trace.num_prompt_tokens - 1) / math.log(2)
    assert traced.trace.bits_per_byte == pytest.approx(bits / num_bytes, rel=1e-4)


def test_last_row_of_the_lens_is_the_prediction(traced):
    parts = traced.trace.activations
    likeliest = parts.logits.softmax(-1).topk(5)
    assert torch.equal(parts.lens_ids[-1], likeliest.indices)
    assert close(parts.lens_probabilities[-1], likeliest.values)
    assert close(parts.logits, call(traced.model, traced.ids, use_cache=False).logits[0])


def test_lens_goes_the_models_own_way(record):
    for kind, cap in (("llama", None), ("gemma2", 3.0)):
        traced = record(kind)
        parts = traced.trace.activations
        with torch.no_grad():
            logits = traced.model.lm_head(traced.model.model.norm(parts.hidden[1:]))
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        likeliest = logits.softmax(-1).topk(5)
        assert close(parts.lens_probabilities, likeliest.values)
        assert torch.equal(parts.lens_ids, likeliest.indices)


def test_sampling_is_reproducible_and_leaves_the_random_state(small_tokenizer):
    model = make_model("llama")

    def tokens(sampling):
        run = trace(model, small_tokenizer, "The", new_tokens=8, sampling=sampling, timing_s=0.0)
        assert run.sampling == sampling
        return [token.id for token in run.tokens]

    before = torch.get_rng_state()
    drawn = tokens(Sampling(temperature=5.0, top_k=None, top_p=1.0, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert tokens(Sampling(temperature=5.0, top_k=None, top_p=1.0, seed=1)) == drawn
    assert tokens(Sampling(temperature=5.0, top_k=None, top_p=1.0, seed=2)) != drawn
    assert tokens(Sampling(temperature=5.0, top_k=1, top_p=1.0, seed=2)) == tokens(None)


def test_stops_where_the_model_ends_the_text(record, small_tokenizer):
    traced = record("gpt2")
    new_ids = traced.ids[0, traced.trace.num_prompt_tokens :].tolist()
    model = copy.deepcopy(traced.model)
    model.generation_config.eos_token_id = new_ids[2]
    run = trace(model, small_tokenizer, PROMPT, new_tokens=6, timing_s=0.0)
    end = new_ids.index(new_ids[2]) + 1
    assert [token.id for token in run.tokens[run.num_prompt_tokens :]] == new_ids[:end]
    assert (len(run.decode), len(run.uncached)) == (end - 1, end)


def test_penalties_of_the_checkpoint_are_off(record, small_tokenizer):
    traced = record("gpt2")
    model = copy.deepcopy(traced.model)
    model.generation_config.update(repetition_penalty=50.0, no_repeat_ngram_size=1, do_sample=True, num_beams=3)
    run = trace(model, small_tokenizer, PROMPT, new_tokens=6, timing_s=0.0)
    assert [token.id for token in run.tokens] == traced.ids[0].tolist()


def test_bfloat16(small_tokenizer):
    run = trace(make_model("llama").bfloat16(), small_tokenizer, "The string", new_tokens=3, timing_s=0.0)
    parts = run.activations
    assert run.model.dtype == "bfloat16"
    assert parts.logits.dtype == parts.hidden.dtype == torch.float32
    assert parts.attention_outputs is not None
    assert torch.equal(parts.lens_ids[-1], parts.logits.topk(5).indices)
    assert run.prefill.cache_bytes == 3 * 2 * run.num_prompt_tokens * 2 * 8 * 2  # L, k and v, P, K, D, bytes


def test_vocabulary_covers_the_tokens_the_lens_and_each_steps_candidates(record):
    run = record("llama").trace
    ids = {*run.activations.lens_ids.flatten().tolist(), *(token.id for token in run.tokens)}
    steps = run.activations.logits[run.num_prompt_tokens - 1 :]
    assert ids | set(steps.topk(200).indices.flatten().tolist()) == run.vocabulary.keys()
    assert F.softmax(steps, -1).topk(200).values.sum(-1).min() > 0.2
