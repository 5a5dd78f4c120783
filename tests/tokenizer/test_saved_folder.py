"""The folder is the contract: it loads with no custom code, as exactly the tokenizer that was saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tercet.tokenizer import train_tokenizer

PROBES = [
    "hello world",
    " x != y 2023 20231231",
    "def f():\n\treturn 'it''s'\n\n    \n",
    "人工智能 👩‍👩‍👧‍👦 مرحبا e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|pad|>x<|endoftext|> <|endoftext|>",
]


@pytest.fixture(scope="module")
def folder(small_corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    train_tokenizer(small_corpus, 1024, model_max_length=512).save_pretrained(path)
    return path


_LOAD_ELSEWHERE = """
import json, sys
from transformers import AutoTokenizer
first, second, probes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(first)
tokenizer.save_pretrained(second)
again = AutoTokenizer.from_pretrained(second)
assert not any(name.partition(".")[0] == "tercet" for name in sys.modules)
print(json.dumps([[tokenizer(text)["input_ids"] for text in probes], [again(text)["input_ids"] for text in probes]]))
"""


def test_ids_are_those_of_the_file_in_a_process_without_tercet(folder, tmp_path):
    shown = subprocess.run(
        [sys.executable, "-c", _LOAD_ELSEWHERE, str(folder), str(tmp_path), json.dumps(PROBES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [reference.encode(text).ids for text in PROBES]
    assert json.loads(shown.stdout) == [expected, expected]
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_everything_set_is_still_set(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for loaded in (tokenizer, again):
        assert loaded.is_fast
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 0, 1)
        assert loaded.all_special_ids == [0, 1, 2, 3]
        assert loaded.padding_side == "left"
        assert loaded.model_max_length == 512
        assert loaded.chat_template == tokenizer.chat_template is not None
        assert loaded.decode(loaded(" it 's , ok ?")["input_ids"]) == " it 's , ok ?"


def test_a_batch_leaves_nothing_in_the_file(folder, tmp_path):
    """A padded, truncated batch writes its lengths into the backend; saved, they would cut every later text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer(["a b c d", "e"], padding=True, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("a b c d")["input_ids"] == AutoTokenizer.from_pretrained(folder)("a b c d")["input_ids"]


def test_the_template_is_a_file_of_its_own(folder, root):
    assert (folder / "chat_template.jinja").read_text() == (root / "tokenizer" / "chat_template.jinja").read_text()
