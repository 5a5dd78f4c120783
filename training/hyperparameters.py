"""What each hyperparameter of a decoder shapes, one plain line each: the part of a model that nobody trains."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# In the order in which a token meets them. Other families' own spellings stand beside transformers' usual names.
MEANINGS: dict[str, str] = {
    "vocab_size": "how many tokens exist: rows of the embedding, and logits per position",
    "hidden_size": "width of the vector that every layer reads and adds to",
    "num_hidden_layers": "how many times attention and MLP follow each other",
    "max_position_embeddings": "longest context the positions are made for, in tokens",
    "position_embedding_type": "how order enters: rotated queries and keys, or a learned vector per position",
    "rope_parameters": "how fast each pair of a head's dimensions turns with position",
    "no_rope_layers": "per layer, 1 rotates queries and keys, 0 leaves them without position",
    "no_rope_layer_interval": "every so many layers, one goes without rotation",
    "num_attention_heads": "query heads: how many patterns of attention a layer has",
    "num_key_value_heads": "key/value heads, each shared by a group of query heads: sets the size of the cache",
    "head_dim": "width of a head's queries, keys and values",
    "qk_norm": "whether queries and keys are normalized per head, which keeps the scores bounded",
    "attention_bias": "whether the query, key and value projections add a learned offset",
    "attention_output_bias": "whether the attention's output projection adds a learned offset",
    "layer_types": "per layer, whether attention sees all of the past or only a window",
    "sliding_window": "how many tokens a windowed layer sees: bounds its cache",
    "use_sliding_window": "whether the window is used at all",
    "intermediate_size": "width of the MLP between its way in and its way out",
    "n_inner": "width of the MLP between its way in and its way out; None is 4 hidden_size",
    "mlp_type": "gated: three matrices, one path multiplies the other; plain: expand, activate, contract",
    "hidden_act": "the bend in the MLP, without which the layers would collapse into one matrix",
    "activation_function": "the bend in the MLP, without which the layers would collapse into one matrix",
    "mlp_bias": "whether the MLP's matrices add a learned offset",
    "norm_type": "what steadies each vector before a block: by its size only, or by mean and size",
    "norm_eps": "keeps the norm from dividing by zero",
    "rms_norm_eps": "keeps the norm from dividing by zero",
    "layer_norm_epsilon": "keeps the norm from dividing by zero",
    "tie_word_embeddings": "whether the head reuses the embedding, so its numbers are stored once",
    "initializer_range": "spread of the random weights before the first step",
    "attention_dropout": "share of attention weights dropped in training",
    "attn_pdrop": "share of attention weights dropped in training",
    "hidden_dropout": "share of a block's output dropped in training",
    "resid_pdrop": "share of a block's output dropped in training",
    "embedding_dropout": "share of the embedding dropped in training",
    "embd_pdrop": "share of the embedding dropped in training",
}


@dataclass(frozen=True)
class HyperparameterRow:
    """One choice made before training, and what it decides."""

    name: str
    value: Any
    shapes: str


def hyperparameter_table(config: "PreTrainedConfig") -> list[HyperparameterRow]:
    """The config's fields that shape the model, in the order in which a token meets them.

    A family's own spelling is read through transformers' common name (GPT-2's `n_embd` as `hidden_size`). Fields that
    only carry housekeeping (token ids, dtype, versions) are left out.
    """
    return [
        HyperparameterRow(name, getattr(config, name), meaning)
        for name, meaning in MEANINGS.items()
        if hasattr(config, name)
    ]
