"""A recorded run: what a model did with one text, as plain values and tensors.

Shapes: P prompt tokens, N generated tokens, S = P + N tokens in all, L layers, H query heads, K key/value heads,
D head_dim, E hidden_size, F intermediate_size, V vocab_size.
"""

from dataclasses import dataclass, field

import torch

NUM_CANDIDATES = 200
"""`Trace.vocabulary` has the likeliest so many ids after each token from the prompt's last on."""


@dataclass(frozen=True)
class WeightFacts:
    """One weight matrix or vector.

    Attributes:
        name: Its name in the state dict.
        shape: As torch has it.
        part: "embedding", "positions", "attention", "mlp", "norm", "head" or "other".
        layer: Which block it is in; None outside the blocks.
        tied_to: Name of the weight that this one is, so that it is not counted twice.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    layer: int | None
    tied_to: str | None = None


@dataclass(frozen=True)
class NormFacts:
    """What one norm does to each token's vector, told from what it was given and what it returned.

    Attributes:
        module: Its name in its block, or in the model.
        label: "LayerNorm" for (x - mean) / standard deviation, "RMSNorm" for x / root mean square, else its class.
        scale: What is learned and multiplies that: "weight", "one_plus_weight" (the weight is kept as its difference
            from 1), "none", or "unknown" where it is neither of the two norms.
        shift: Whether a learned vector is added.
    """

    module: str
    label: str
    scale: str
    shift: bool


@dataclass(frozen=True)
class LayerFacts:
    """What one block is, told from a pass through it.

    Attributes:
        mixer: Class of what mixes tokens in it: its attention, or what stands in attention's place; "" where nothing
            does.
        attends: Whether that is attention with softmax.
        num_key_value_heads: K of this layer.
        head_dim: D of this layer.
        window: How many keys a query sees at most, itself included; None where the past has no such end.
        chunk: Size of the pieces of the text within which a query sees: back to the first token of its own piece, never
            further; None where there are none.
        rotates: Whether it turns queries and keys; None where that cannot be told.
        angle_set: Which of `Activations.rotary_angles` turns them; None where none does or it was not recorded.
        attention_scale: What q·k is multiplied by; None where the model does not tell.
        softcap: What bounds the scores, cap · tanh(score / cap); None where nothing is told to do so.
        has_sink: Whether rows of attention weights sum up to less than 1.
        order: "sequential" where the MLP reads the stream with attention's result in it, "parallel" where it reads what
            attention reads; "other" where the block is no sum of its parts, or what the MLP reads cannot be told.
        added_scale: What each result is multiplied by before it is added.
        attention_input: What attention is given: "normed", "as_is" or "unknown".
        mlp_input: The same of the MLP.
        norm_before_attention: None unless attention's input is "normed"; likewise of the MLP.
        norm_after_attention: Of what attention returns, before that is added.
        inner_norms: Names of norms inside attention.
        mlp: "gated" (activation(gate) * up), "plain" (activation(up)), "experts" (several, chosen per token), "none" or
            "unknown".
        mlp_width: Width of the MLP's inside; of one expert's.
    """

    mixer: str
    attends: bool
    num_key_value_heads: int
    head_dim: int
    window: int | None
    chunk: int | None
    rotates: bool | None
    angle_set: int | None
    attention_scale: float | None
    softcap: float | None
    has_sink: bool
    order: str
    added_scale: float
    attention_input: str
    mlp_input: str
    norm_before_attention: NormFacts | None
    norm_after_attention: NormFacts | None
    norm_before_mlp: NormFacts | None
    norm_after_mlp: NormFacts | None
    inner_norms: tuple[str, ...]
    mlp: str
    mlp_width: int


@dataclass(frozen=True)
class EntryFacts:
    """How ids become the stream that the first block reads, told from a pass.

    Attributes:
        row_scale: What the embedding multiplies its matrix's rows by; None where what it returns is no such multiple.
        position_offset: Which row of the matrix of learned positions the first token has; None where that is not told.
        way: "as_is" where the first block reads embedding plus learned position, if there is one; "scaled" where the
            embedding is multiplied by `scale` first; "normed" where a norm follows; else "other".
    """

    row_scale: float | None
    position_offset: int | None
    way: str
    scale: float


@dataclass(frozen=True)
class ExitFacts:
    """How the stream behind the last block becomes logits, told from a pass.

    Attributes:
        norm: The final norm; None where there is none, or it cannot be told.
        way: "as_is" where logits are what the head returns, "scaled" by `value`, "capped" as value · tanh(x / value),
            else "other".
    """

    norm: NormFacts | None
    way: str
    value: float


@dataclass(frozen=True)
class ModelFacts:
    """What the model is, under the names that all families share.

    Attributes:
        name: Of the checkpoint, for the page's title.
        positions: "rotary", "learned", "alibi" (scores fall with distance) or "unknown".
        activation: The MLPs' activation.
        activation_is_seen: Whether it was seen to be that; else only the config says so.
        layers: Of each block.
        hyperparameters: The config's fields, in its order, as JSON holds them.
        num_parameters: Tied weights once.
    """

    name: str
    class_name: str
    model_type: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    positions: str
    activation: str
    activation_is_seen: bool
    entry: EntryFacts
    exit: ExitFacts
    layers: tuple[LayerFacts, ...]
    num_parameters: int
    weights: tuple[WeightFacts, ...]
    hyperparameters: dict[str, object]


@dataclass(frozen=True)
class TokenFacts:
    """One token.

    Attributes:
        text: As a reader sees it; a byte that is no UTF-8 of its own is spelt, as <E4>.
        bytes: What it stands for, hexadecimal; empty where a special token stands for no text.
    """

    id: int
    text: str
    bytes: str
    is_special: bool


@dataclass(frozen=True)
class StepFacts:
    """One forward pass of inference: the prefill, or the decode of one token.

    Attributes:
        num_queries: Tokens given to the model in this pass (T): the prompt's in prefill, 1 in decode.
        num_keys: Keys visible to the last of them (cached and new), in the layer that sees most.
        flops: Of all matrix products, multiplications and additions counted apart, as torch's FlopCounterMode counts
            them: scores that the mask blanks are computed, too. Only the last token's logits are asked for, as in
            `generate()`.
        weight_bytes_read: Weights that the pass must read once; of lookup tables the rows of its tokens.
        cache_bytes_read: Keys and values of earlier tokens that it reads.
        cache_bytes: Size of the keys and values held after the pass, all layers; 0 without a cache.
        cache_bytes_per_layer: The same by layer.
        cache_bytes_allocated: Memory taken for them, `nbytes` of a TercetCache; more than is held where buffers grow
            ahead.
        duration_s: Measured; the median where the pass was run several times.
        token: Position in `Trace.tokens` of the token that the pass chose.
    """

    num_queries: int
    num_keys: int
    flops: int
    weight_bytes_read: int
    cache_bytes_read: int
    cache_bytes: int
    cache_bytes_per_layer: tuple[int, ...]
    cache_bytes_allocated: int
    duration_s: float
    token: int


@dataclass(frozen=True)
class LeftOut:
    """Something that the record could not hold, or holds only nearly.

    Attributes:
        part: A field of `Activations`, or "cache", "tokens", "weight_bytes_read".
        reason: Why: names a sentence of `page/en.json` and `page/zh.json`, "reason." before it.
        values: What is put into the sentence.
    """

    part: str
    reason: str
    values: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How the new tokens were drawn; `Trace.sampling` is None where each is the likeliest.

    Attributes:
        temperature: Divides the logits; above 0.
        top_k: Only so many of the likeliest tokens; None is all.
        top_p: Only the likeliest tokens that together have this probability; 1 is all.
    """

    temperature: float
    top_k: int | None
    top_p: float
    seed: int


@dataclass(frozen=True)
class Activations:
    """What the recording pass over all S tokens saw, float32 on the CPU; None where a model does not show it.

    Attributes:
        embeddings: Token embeddings, (S, E).
        position_embeddings: Learned position embeddings, (S, E); None where positions are rotary.
        rotary_angles: cos then sin of each rotation that the layers use, (C, 2, S, R), R <= D rotated dimensions. As a
            rule C is 1; those of another R than the first are not here.
        hidden: The residual stream before the first block and after each, (L + 1, S, E); the last without final norm.
        queries: As the dot products see them (after q/k norms and rotation), (L, H, S, D).
        keys: Likewise, as the cache holds them, (L, K, S, D).
        values: (L, K, S, D); a few families have another width here.
        attentions: Softmax of the masked scores, (L, H, S, S); row: query, column: key.
        attention_outputs: What attention adds to the residual stream, (L, S, E).
        mlp_gates: What the gating matrix gives, before the activation, (L, S, F); None where the MLP has no gate.
        mlp_ups: What the expanding matrix gives, (L, S, F): before the activation or, with a gate, never activated.
        mlp_activations: What the contracting matrix is given, (L, S, F): activation(mlp_gates) * mlp_ups, or, without a
            gate, activation(mlp_ups).
        mlp_outputs: What the MLP adds, (L, S, E).
        lens_ids: Logit lens: the final norm and head applied after each block, top five ids, (L, S, 5).
        lens_probabilities: Their probabilities, (L, S, 5).
        logits: (S, V).
    """

    embeddings: torch.Tensor
    position_embeddings: torch.Tensor | None
    rotary_angles: torch.Tensor | None
    hidden: torch.Tensor
    queries: torch.Tensor | None
    keys: torch.Tensor | None
    values: torch.Tensor | None
    attentions: torch.Tensor | None
    attention_outputs: torch.Tensor | None
    mlp_gates: torch.Tensor | None
    mlp_ups: torch.Tensor | None
    mlp_activations: torch.Tensor | None
    mlp_outputs: torch.Tensor | None
    lens_ids: torch.Tensor
    lens_probabilities: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """One run of one model on one text.

    Attributes:
        tokens: The prompt's and the generated ones, S in all.
        vocabulary: Text of every id that the page may have to show: the tokens', the lens's, and of each step the
            NUM_CANDIDATES likeliest.
        prefill: The pass over the prompt, which chooses the first new token.
        decode: Passes of one token each, N - 1 of them: the last token chosen is never given to the model. None at all
            where the model keeps no cache (`left_out` says so).
        uncached: The same tokens without a cache: each pass is given all tokens so far, N passes.
        cache_bytes_per_token: Of each layer what one token's key and value take in the cache; 0 where it keeps none.
        losses: -log p of each token but the first, given those before it, in nats, S - 1.
        bits_per_byte: Of the prompt: sum of its tokens' losses in bits, by the bytes they stand for; None where none of
            them has a loss (a prompt of one token).
        versions: Of torch, transformers and Tercet; and the processor.
    """

    model: ModelFacts
    prompt: str
    sampling: Sampling | None
    num_prompt_tokens: int
    tokens: tuple[TokenFacts, ...]
    vocabulary: dict[int, str]
    prefill: StepFacts
    decode: tuple[StepFacts, ...]
    uncached: tuple[StepFacts, ...]
    cache_bytes_per_token: tuple[int, ...]
    losses: tuple[float, ...]
    bits_per_byte: float | None
    activations: Activations
    left_out: tuple[LeftOut, ...]
    versions: dict[str, str]
