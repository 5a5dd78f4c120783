"""The hyperparameters of a Tercet decoder: one class, a handful of orthogonal choices.

Everything that shapes the model is a field here and nowhere else. Two named starting points, `TercetConfig.classic()`
(GPT-2's choices) and `TercetConfig.modern()` (Llama's and Qwen3's, also the defaults), differ in fields only.
"""

import difflib
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

if TYPE_CHECKING:
    # For transformers' copier, a regular expression that follows such lines and their files' own: a config is saved
    # with every model, and so all of the code is, also for a class that no Auto class has seen and for a subclass.
    from .modeling_tercet import TercetPreTrainedModel  # noqa: F401


@strict
class TercetConfig(PreTrainedConfig):
    r"""Configuration of [`TercetModel`] and its heads.

    Args:
        vocab_size (`int`, defaults to 32000):
            Number of rows V of the token embedding.
        hidden_size (`int`, defaults to 768):
            Width E of the residual stream.
        intermediate_size (`int`, *optional*):
            Width of the feed-forward layer. Default: 4 E for `mlp_type="plain"`, 8/3 E rounded up to a multiple of 64
            for `"gated"`, which has three matrices instead of two, so that both have about 8 E² parameters.
        num_hidden_layers (`int`, defaults to 12):
            Number of blocks.
        num_attention_heads (`int`, defaults to 12):
            Number H of query heads.
        num_key_value_heads (`int`, *optional*):
            Number K of key/value heads; H / K query heads share one (GQA, arXiv:2305.13245). Default: H.
        head_dim (`int`, *optional*):
            Size D of one head. Default: E / H.
        hidden_act (`str`, defaults to `"silu"`):
            Activation between expansion and contraction, by its name in transformers.
        mlp_type (`"gated"` or `"plain"`, defaults to `"gated"`):
            `gated`: down(act(gate(x)) * up(x)) (arXiv:2002.05202); `plain`: down(act(up(x))).
        mlp_bias (`bool`, defaults to `False`):
            Biases in the feed-forward projections.
        norm_type (`"rms_norm"` or `"layer_norm"`, defaults to `"rms_norm"`):
            `layer_norm` has a scale and a bias, `rms_norm` (arXiv:1910.07467) a scale.
        norm_eps (`float`, defaults to 1e-6):
            Added to the variance before its square root.
        position_embedding_type (`"rope"` or `"learned"`, defaults to `"rope"`):
            Rotary embeddings in every attention layer (arXiv:2104.09864), or one learned vector per position added to
            the token embedding.
        max_position_embeddings (`int`, defaults to 2048):
            Longest sequence: a hard bound with learned positions, the trained length with rotary ones.
        rope_parameters (`dict`, *optional*):
            `rope_type`, `rope_theta` (default 10000) and what that type needs, as everywhere in transformers.
        no_rope_layers (`list[int]`, *optional*):
            One entry a layer, 1 where the layer uses RoPE, 0 where it has no position information (SmolLM3's field).
        qk_norm (`bool`, defaults to `True`):
            RMS-normalise each query and key head before rotation (arXiv:2302.05442, Qwen3).
        attention_bias (`bool`, defaults to `False`):
            Biases in the query, key and value projections.
        attention_output_bias (`bool`, defaults to `False`):
            Bias in the output projection.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer. Default: all sliding if `sliding_window` is
            given, else all full.
        sliding_window (`int`, *optional*):
            Number of positions that a sliding layer sees, the token itself included; full layers do not use it.
        tie_word_embeddings (`bool`, defaults to `True`):
            The output head is the token embedding.
        attention_dropout, hidden_dropout, embedding_dropout (`float`, default to 0.0):
            Dropout of attention weights, of each sub-layer's output, of the embedding's output.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of new weights; projections that write into the residual stream get it divided by
            sqrt(2 * num_hidden_layers) (GPT-2, section 2.3).

    Raises:
        ValueError: A combination that has no meaning; the message names the fields and a remedy.

    Example:

        >>> from tercet.modeling import TercetConfig, TercetForCausalLM
        >>> model = TercetForCausalLM(TercetConfig.modern(vocab_size=8192, hidden_size=256, num_hidden_layers=4,
        ...                                               num_attention_heads=4, num_key_value_heads=2))
    """

    model_type = "tercet"
    _auto_class = "AutoConfig"  # what `register_for_auto_class` sets: saved configs carry their code
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012 - the class attributes of a config are not fields
    default_theta = 10_000.0
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        # Every rank normalises its own heads with the same weight, so their gradients are summed.
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    mlp_type: Literal["gated", "plain"] = "gated"
    mlp_bias: bool = False
    norm_type: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float = 1e-6
    position_embedding_type: Literal["rope", "learned"] = "rope"
    max_position_embeddings: int = 2048
    rope_parameters: RopeParameters | dict | None = None
    no_rope_layers: list[int] | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = True
    attention_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def classic(cls, **fields: Any) -> "TercetConfig":
        """GPT-2's choices: LayerNorm, learned positions, GELU in a plain 4 E feed-forward, biases, tied embeddings."""
        choices: dict[str, Any] = {
            "norm_type": "layer_norm",
            "norm_eps": 1e-5,
            "position_embedding_type": "learned",
            "max_position_embeddings": 1024,
            "mlp_type": "plain",
            "hidden_act": "gelu_new",
            "mlp_bias": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "qk_norm": False,
        }
        return cls(**{**choices, **fields})

    @classmethod
    def modern(cls, **fields: Any) -> "TercetConfig":
        """The defaults: RMSNorm, RoPE, SwiGLU, QK-norm, no biases; give `num_key_value_heads` for grouped queries."""
        return cls(**fields)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads != 0:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                    f"({self.num_attention_heads}): change one of them, or set head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            gated_size = -(-8 * self.hidden_size // 3)
            self.intermediate_size = 4 * self.hidden_size if self.mlp_type == "plain" else -(-gated_size // 64) * 64
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.position_embedding_type == "learned" and self.rope_parameters:
            raise ValueError(
                "rope_parameters has no meaning with position_embedding_type='learned': "
                "remove it, or set position_embedding_type='rope'."
            )
        super().__post_init__(**kwargs)
        if self.position_embedding_type == "learned":
            # The base class fills in a default theta for every config that has the field.
            self.rope_parameters = None
        # A plan may name only modules that exist: transformers warns about each pattern that matches nothing.
        absent = set() if self.qk_norm else {"q_norm", "k_norm"}
        absent |= set() if self.mlp_type == "gated" else {"gate_proj"}
        plan = self.base_model_tp_plan or {}
        plan = {name: cut for name, cut in plan.items() if name.rpartition(".")[2] not in absent}
        object.__setattr__(self, "base_model_tp_plan", plan)
        # `@strict` calls this again and wraps what it raises in an error of its own; here it is a plain ValueError.
        self.validate_architecture()

    def uses_rope(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` rotates its queries and keys."""
        if self.position_embedding_type == "learned":
            return False
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer_idx])

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Standardise RoPE fields, except where there is no RoPE (the base class would warn about it)."""
        if self.position_embedding_type == "learned":
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse combinations without meaning; called by `@strict` when a config is made.

        Raises:
            ValueError: Names the fields, their values and a remedy.
        """
        self._validate_sizes()
        self._validate_positions()
        self._validate_layer_kinds()

    def _validate_sizes(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least 1.")
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}): each key/value head serves a whole group of query heads."
            )
        if self.hidden_act not in ACT2FN:
            known = difflib.get_close_matches(self.hidden_act, ACT2FN, n=1) or sorted(ACT2FN)
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}, no activation of transformers: try {', '.join(known)}."
            )
        for field in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(
                    f"{field} is {getattr(self, field)}: a probability of at least 0 and below 1 is needed."
                )

    def _validate_positions(self) -> None:
        if self.position_embedding_type == "learned":
            if self.no_rope_layers is not None:
                raise ValueError(
                    "no_rope_layers has no meaning with position_embedding_type='learned': remove it, "
                    "or set position_embedding_type='rope'."
                )
            return
        assert self.head_dim is not None
        if self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim is {self.head_dim}, and RoPE rotates pairs: choose an even head_dim, "
                "or position_embedding_type='learned'."
            )
        if (self.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("rope_parameters.partial_rotary_factor: only whole heads are rotated; remove it.")
        if self.no_rope_layers is not None and (
            len(self.no_rope_layers) != self.num_hidden_layers or not set(self.no_rope_layers) <= {0, 1}
        ):
            raise ValueError(
                f"no_rope_layers is {self.no_rope_layers}: it needs one 1 (RoPE) or 0 (none) for each of "
                f"num_hidden_layers={self.num_hidden_layers} layers."
            )

    def _validate_layer_kinds(self) -> None:
        assert self.layer_types is not None
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"layer_types holds {unknown}: a layer is 'full_attention' or 'sliding_attention'.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}: "
                "give one for each layer."
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"layer_types has sliding layers and sliding_window is {self.sliding_window}: "
                "set sliding_window to the number of visible positions."
            )


__all__ = ["TercetConfig"]
