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

from tercet.modeling.cache_layers_tercet import TercetCacheLayer, TercetSlidingLayer
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
    "TercetCache",
    "TercetCacheLayer",
    "TercetConfig",
    "TercetForCausalLM",
    "TercetForQuestionAnswering",
    "TercetForSequenceClassification",
    "TercetForTokenClassification",
    "TercetModel",
    "TercetPreTrainedModel",
    "TercetSlidingLayer",
]
