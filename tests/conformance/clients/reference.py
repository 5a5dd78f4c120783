"""What clients are compared with: the model in this process, by the installed package."""

from functools import cached_property
from pathlib import Path
from pydoc_data import topics

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tercet.modeling import TercetForCausalLM

PROMPTS = ["Return a list of", "The module provides", "If the argument is"]
NUM_NEW_TOKENS = 16
# Short, of several lengths, none longer than the model's 128 positions.
TEXTS = [
    text[index : index + 160 + 20 * (index % 4)] for index, (_, text) in enumerate(sorted(topics.topics.items())[:8])
]


class Reference:
    """A checkpoint's model and tokenizer, loaded when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def model(self) -> PreTrainedModel:
        return TercetForCausalLM.from_pretrained(self.folder).eval()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def chat_ids(self, message: str) -> list[int]:
        """A user's message, up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return self.ids(text)

    def greedy(self, ids: list[int], num_tokens: int = NUM_NEW_TOKENS) -> list[int]:
        output = self.model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)
        return output[0, len(ids) :].tolist()

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Greedy continuations of PROMPTS: text, and no single token over and over."""
        tokens = [self.greedy(self.ids(prompt)) for prompt in PROMPTS]
        assert all(len(set(row)) >= 6 for row in tokens), tokens
        return tokens

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """(T, V)."""
        return self.model(torch.tensor([ids])).logits[0]

    def nats(self, ids: list[int]) -> torch.Tensor:
        """Of each token but the first, (T - 1,)."""
        scores = self.logits(ids)[:-1].log_softmax(-1)
        return -scores.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)


def count_equal(tokens: list[list[int]], expected: list[list[int]]) -> str:
    """How many tokens agree up to each row's first difference, said as the table says it."""
    equal = 0
    for row, wanted in zip(tokens, expected, strict=True):
        same = [one == other for one, other in zip(row, wanted, strict=False)]
        equal += same.index(False) if False in same else len(same)
    return f"{equal} of {sum(map(len, expected))} greedy tokens equal"
