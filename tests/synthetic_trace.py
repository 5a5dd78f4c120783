"""A trace of random numbers that agree with one another, of any size: for tests that need a size, not a model.

Shapes: P prompt tokens, S tokens in all, L layers, H query heads, K key/value heads, D head_dim, E hidden_size,
F intermediate_size, V vocab_size.
"""

import math

import torch

from tercet.explorer.record import (
    NUM_CANDIDATES,
    Activations,
    EntryFacts,
    ExitFacts,
    LayerFacts,
    ModelFacts,
    NormFacts,
    StepFacts,
    TokenFacts,
    Trace,
    WeightFacts,
)

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "his",
    "they",
]


def synthetic_trace(
    *,
    num_layers: int = 12,
    num_heads: int = 12,
    num_key_value_heads: int = 12,
    head_dim: int = 64,
    intermediate_size: int = 3072,
    vocab_size: int = 50257,
    num_prompt_tokens: int = 48,
    num_tokens: int = 64,
) -> Trace:
    """GPT-2 small's shapes and 64 tokens, if not told otherwise."""
    L, H, K, D, F, V = num_layers, num_heads, num_key_value_heads, head_dim, intermediate_size, vocab_size
    P, S = num_prompt_tokens, num_tokens
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    E = H * D
    queries, keys, values = normal(L, H, S, D) * 1.5, normal(L, K, S, D) * 1.5, normal(L, K, S, D)
    scores = queries @ keys.repeat_interleave(H // K, dim=1).transpose(-1, -2) / math.sqrt(D)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    attentions = scores.masked_fill(future, -math.inf).softmax(-1)
    embeddings, positions = normal(S, E) * 0.1, normal(S, E) * 0.05
    attention_outputs, mlp_outputs = normal(L, S, E) * 0.1, normal(L, S, E) * 0.1
    ups = normal(L, S, F)
    first = embeddings + positions
    hidden = torch.cat([first[None], first + (attention_outputs + mlp_outputs).cumsum(0)])
    logits = normal(S, V) * 2
    ids = torch.randint(0, V, (S,), generator=generator)
    for position in range(P - 1, S - 1):
        logits[position, ids[position + 1]] = logits[position].max() + 1
    lens = (normal(L, S, V if V < 4096 else 4096) * 2).softmax(-1).topk(5)
    lens_ids, lens_probabilities = lens.indices, lens.values
    last = logits.softmax(-1).topk(5)
    lens_ids[-1], lens_probabilities[-1] = last.indices, last.values
    shown = {*ids.tolist(), *lens_ids.unique().tolist()}
    for position in range(P - 1, S):
        shown |= set(logits[position].topk(min(NUM_CANDIDATES, V)).indices.tolist())
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    tokens = tuple(_token(index) for index in ids.tolist())
    num_bytes = sum(len(token.bytes) // 2 for token in tokens[1:P])
    weights = _weights(L, E, F, V)
    return Trace(
        model=ModelFacts(
            name="synthetic",
            class_name="GPT2LMHeadModel",
            model_type="gpt2",
            dtype="float32",
            num_layers=L,
            hidden_size=E,
            num_heads=H,
            num_key_value_heads=K,
            head_dim=D,
            vocab_size=V,
            max_positions=1024,
            positions="learned",
            activation="gelu_new",
            activation_is_seen=True,
            entry=EntryFacts(1.0, 0, "as_is", 1.0),
            exit=ExitFacts(_norm("ln_f"), "as_is", 1.0),
            layers=(_layer(K, D, F),) * L,
            num_parameters=sum(math.prod(weight.shape) for weight in weights if weight.tied_to is None),
            weights=weights,
            hyperparameters={"n_embd": E, "n_layer": L, "n_head": H, "vocab_size": V, "layer_norm_epsilon": 1e-5},
        ),
        prompt="".join(token.text for token in tokens[:P]),
        sampling=None,
        num_prompt_tokens=P,
        tokens=tokens,
        vocabulary={index: _token(index).text for index in sorted(shown)},
        prefill=_step(P, P, L, K * D, cached=True),
        decode=tuple(_step(1, P + i, L, K * D, cached=True) for i in range(1, S - P)),
        uncached=tuple(_step(P + i, P + i, L, K * D, cached=False) for i in range(S - P)),
        cache_bytes_per_token=(K * D * 2 * 4,) * L,
        losses=tuple(losses.tolist()),
        bits_per_byte=losses[: P - 1].sum().item() / math.log(2) / num_bytes if P > 1 else None,
        activations=Activations(
            embeddings=embeddings,
            position_embeddings=positions,
            rotary_angles=None,
            hidden=hidden,
            queries=queries,
            keys=keys,
            values=values,
            attentions=attentions,
            attention_outputs=attention_outputs,
            mlp_gates=None,
            mlp_ups=ups,
            mlp_activations=torch.nn.functional.gelu(ups, approximate="tanh"),
            mlp_outputs=mlp_outputs,
            lens_ids=lens_ids,
            lens_probabilities=lens_probabilities,
            logits=logits,
        ),
        left_out=(),
        versions={"torch": torch.__version__},
    )


def _norm(module: str) -> NormFacts:
    return NormFacts(module, "LayerNorm", "weight", True)


def _layer(num_key_value_heads: int, head_dim: int, mlp_width: int) -> LayerFacts:
    return LayerFacts(
        mixer="GPT2Attention",
        attends=True,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        window=None,
        chunk=None,
        rotates=False,
        angle_set=None,
        attention_scale=1 / math.sqrt(head_dim),
        softcap=None,
        has_sink=False,
        order="sequential",
        added_scale=1.0,
        attention_input="normed",
        mlp_input="normed",
        norm_before_attention=_norm("ln_1"),
        norm_after_attention=None,
        norm_before_mlp=_norm("ln_2"),
        norm_after_mlp=None,
        inner_norms=(),
        mlp="plain",
        mlp_width=mlp_width,
    )


def _token(index: int) -> TokenFacts:
    text = f" {WORDS[index % len(WORDS)]}{index // len(WORDS)}"
    return TokenFacts(id=index, text=text, bytes=text.encode().hex(), is_special=False)


def _step(num_queries: int, num_keys: int, layers: int, width: int, *, cached: bool) -> StepFacts:
    """Of a cache of `layers` layers whose keys have `width` numbers each."""
    column = width * 2 * 4
    layer = num_keys * column if cached else 0
    return StepFacts(
        num_queries=num_queries,
        num_keys=num_keys,
        flops=num_queries * 170_000_000,
        weight_bytes_read=498_000_000,
        cache_bytes_read=layers * (num_keys - num_queries) * column,
        cache_bytes=layers * layer,
        cache_bytes_per_layer=(layer,) * layers,
        cache_bytes_allocated=layers * layer,
        duration_s=0.02 + num_queries * 0.001,
        token=num_keys,
    )


def _weights(layers: int, hidden: int, wide: int, vocab: int) -> tuple[WeightFacts, ...]:
    weights = [
        WeightFacts("transformer.wte.weight", (vocab, hidden), "embedding", None),
        WeightFacts("transformer.wpe.weight", (1024, hidden), "positions", None),
    ]
    for layer in range(layers):
        for name, shape, part in (
            ("ln_1.weight", (hidden,), "norm"),
            ("attn.c_attn.weight", (hidden, 3 * hidden), "attention"),
            ("attn.c_proj.weight", (hidden, hidden), "attention"),
            ("ln_2.weight", (hidden,), "norm"),
            ("mlp.c_fc.weight", (hidden, wide), "mlp"),
            ("mlp.c_proj.weight", (wide, hidden), "mlp"),
        ):
            weights.append(WeightFacts(f"transformer.h.{layer}.{name}", shape, part, layer))
    weights.append(WeightFacts("lm_head.weight", (vocab, hidden), "head", None, tied_to="transformer.wte.weight"))
    return tuple(weights)
