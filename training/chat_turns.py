"""Where a turn of a conversation ends: the token that a chat template writes behind what the assistant says."""

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Written into a conversation to find what the template puts behind it; any word that no template writes will do.
_ANSWER = "xyzzy"


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends an assistant's turn; None where the template writes none, or refuses one turn."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, ValueError):
        return None
    behind = text.rpartition(_ANSWER)[2].lstrip()
    special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    # The longest: a name may begin another.
    found = max((name for name in special if behind.startswith(name)), key=len, default=None)
    return None if found is None else special[found]


def end_where_turns_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `generate()` stop at the end of a turn, too, which the settings of a base model do not know."""
    end, settings = turn_end_id(tokenizer), model.generation_config
    if end is None or settings is None:
        return
    known = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, list) else [known]
    settings.eos_token_id = ends if end in ends else [*ends, end]
