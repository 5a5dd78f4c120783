"""The decoder and its cache, registered with transformers' Auto classes.

The `*_tercet.py` files are copied to the Hub beside the weights; this one is not, and so registration stands here.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tercet.modeling.cache_codecs_tercet import GroupedIntegers, TercetQuantizedLayer, TercetQuantizedSlidingLayer
from tercet.modeling.cache_files_tercet import count_common_tokens, fingerprint, read_prompt_ids
from tercet.modeling.cache_fork_tercet import TercetForkedLayer
from tercet.modeling.cache_layers_tercet import Segment, Slots, TercetCacheLayer
from tercet.modeling.cache_sliding_tercet import TercetSlidingLayer
from tercet.modeling.cache_tercet import TercetCache
from tercet.modeling.configuration_tercet import TercetConfig
from tercet.modeling.modeling_tercet import (
    TercetForCausalLM,
    TercetForQuestionAnswering,
    TercetForSequenceClassification,
    TercetForTokenClassification,
    TercetModel,
    TercetPreTrainedModel,
)

AutoConfig.register("tercet", TercetConfig)
for _auto_class, _model_class in (
    (AutoModel, TercetModel),
    (AutoModelForCausalLM, TercetForCausalLM),
    (AutoModelForSequenceClassification, TercetForSequenceClassification),
    (AutoModelForTokenClassification, TercetForTokenClassification),
    (AutoModelForQuestionAnswering, TercetForQuestionAnswering),
):
    # Not `register_for_auto_class`, which subclasses inherit: they would be saved as the file that they stand in. The
    # code travels with the config.
    _auto_class.register(TercetConfig, _model_class)

__all__ = [
    "GroupedIntegers",
    "Segment",
    "Slots",
    "TercetCache",
    "TercetCacheLayer",
    "TercetConfig",
    "TercetForCausalLM",
    "TercetForQuestionAnswering",
    "TercetForSequenceClassification",
    "TercetForTokenClassification",
    "TercetForkedLayer",
    "TercetModel",
    "TercetPreTrainedModel",
    "TercetQuantizedLayer",
    "TercetQuantizedSlidingLayer",
    "TercetSlidingLayer",
    "count_common_tokens",
    "fingerprint",
    "read_prompt_ids",
]
