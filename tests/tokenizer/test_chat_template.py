"""ChatML, as `apply_chat_template` renders it."""

import pytest
from jinja2.exceptions import TemplateError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there."},
    {"role": "user", "content": " spaces kept \n"},
    {"role": "assistant", "content": "Yes: 中\n"},
]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello there.<|im_end|>\n"
    "<|im_start|>user\n spaces kept \n<|im_end|>\n"
    "<|im_start|>assistant\nYes: 中\n<|im_end|>\n"
)


def test_renders(small_tokenizer):
    assert small_tokenizer.apply_chat_template(CHAT, tokenize=False) == RENDERED
    prompt = small_tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert RENDERED.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_role_marks_are_single_tokens(small_tokenizer):
    ids = small_tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert ids.count(2) == ids.count(3) == len(CHAT)
    assert small_tokenizer.decode(ids) == RENDERED


def test_mask_covers_what_the_assistant_writes(small_tokenizer):
    shown = small_tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = shown["input_ids"], shown["assistant_masks"]
    assert len(mask) == len(ids)
    written = small_tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
    assert written == "Hello there.<|im_end|>Yes: 中\n<|im_end|>"


def test_padded_batch_on_the_left(small_tokenizer):
    batch = small_tokenizer.apply_chat_template(
        [CHAT[:1], CHAT[:2]], add_generation_prompt=True, padding=True, return_dict=True
    )
    newline = small_tokenizer("\n")["input_ids"][0]
    assert [row[-1] for row in batch["input_ids"]] == [newline, newline]
    assert batch["input_ids"][0][0] == small_tokenizer.pad_token_id
    assert batch["attention_mask"][0][0] == 0


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "bot", "content": "x"}, "Message 1 has the role 'bot'; use 'system', 'user' or 'assistant'"),
        ({"content": "x"}, "Message 1 has the role ''"),
        ({"role": "user"}, "Message 1 has no text"),
        ({"role": "user", "content": ["x"]}, "Message 1 has no text"),
        ({"role": "system", "content": "x"}, "Message 1 has the role 'system'; only the first message may"),
    ],
)
def test_bad_messages_are_refused(small_tokenizer, message, says):
    with pytest.raises(TemplateError, match=says):
        small_tokenizer.apply_chat_template([CHAT[0], message], tokenize=False)
