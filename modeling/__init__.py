"""The decoder and its cache, registered with transformers' Auto classes.

The `*_tercet.py` files are copied to the Hub beside the weights; this one is not, which is why registration,
and how code gets into a saved folder, stand here.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tercet.modeling.cache_tercet import TercetCache, TercetCacheLayer, TercetSlidingLayer
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
TercetConfig.register_for_auto_class()
for _auto_class, _model_class in (
    (AutoModel, TercetModel),
    (AutoModelForCausalLM, TercetForCausalLM),
    (AutoModelForSequenceClassification, TercetForSequenceClassification),
    (AutoModelForTokenClassification, TercetForTokenClassification),
    (AutoModelForQuestionAnswering, TercetForQuestionAnswering),
):
    _auto_class.register(TercetConfig, _model_class)
    # Saved folders carry their code and say which class to load, so that they work without Tercet installed.
    _model_class.register_for_auto_class(_auto_class.__name__)

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
