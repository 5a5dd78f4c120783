"""docs/chat.md is executed, from a checkpoint to the chat; and what turns dialogues into messages for it."""

import io
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tercet.recipes.chatterbot_corpus import arranged, conversations
from tercet.training.errors import UserError
from tercet.training.recipe import load_recipe
from tercet.training.sources import Source, read_documents
from tercet.training.split import is_validation

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
DIALOGUES = [[f"Question {i}?", f"Answer {i}."] for i in range(200)]
# Of the page's commands, what a test does in seconds.
SMALL = ["training.num_steps=3", "training.evaluate_every=3", "training.sequence_length=32", "samples.max_new_tokens=3"]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """A package of the corpus's name and layout, installed."""
    folder = tmp_path / "site" / "chatterbot_corpus" / "data" / "english"
    folder.mkdir(parents=True)
    (folder.parents[1] / "__init__.py").touch()
    (folder / "a.yml").write_text(yaml.safe_dump({"categories": ["a"], "conversations": DIALOGUES}), "utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def convert(monkeypatch, *arguments: str) -> None:
    """`python -m tercet.recipes.chatterbot_corpus ...`"""
    monkeypatch.setattr("sys.argv", ["chatterbot_corpus", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("tercet.recipes.chatterbot_corpus", run_name="__main__")
    assert not stop.value.code


def test_the_commands_of_the_page_run(tercet, checkpoint, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "out/demo")
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
    ran = []
    for command in commands:
        before, _, after = command.rpartition(" | ")
        words = shlex.split(after)
        if words[:2] in (["tercet", "demo"], ["pip", "install"]):  # which stand here already
            continue
        ran.append(words[1])
        if words[0] == "python":
            convert(monkeypatch, *words[3:])
            continue
        assert words[0] == "tercet", command
        if words[1] == "train":
            words += [word for setting in SMALL for word in ("--set", setting)]
        if words[1] == "plan":
            words += ["--set", SMALL[2]]
        typed = shlex.split(before)[1].replace("\\n", "\n") if before else "/quit\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        shown = tercet(*words[1:])
        assert shown.code == 0, f"{command}\n{shown.err}"
    assert {"train", "chat", "plan", "info"} <= set(ran)


def test_dialogues_become_messages(corpus):
    (corpus / "b.yml").write_text(
        'categories: [b]\nconversations:\n- - " Is it? "\n  - Yes\n- [Alone]\n- [1, 2, "3", "4", "5"]\n', "utf-8"
    )
    found = list(conversations(corpus))
    assert [[m["content"] for m in messages] for messages in found] == [
        *DIALOGUES, ["Is it?", "Yes"], ["1", "2", "3", "4"],
    ]  # fmt: skip
    assert all([m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) for messages in found)


def test_what_is_held_out_is_learned_nowhere_else(corpus, checkpoint, tmp_path, monkeypatch, small_tokenizer):
    """By the recipe's own split of what is written, a source of conversations."""
    convert(monkeypatch, str(tmp_path / "new" / "d.jsonl"))
    source = Source(path=str(tmp_path / "new" / "d.jsonl"), messages_column="messages")
    recipe = load_recipe("sft", [f"model.from_checkpoint={checkpoint}", "training.sequence_length=32"])
    fraction = recipe.data.validation_fraction
    questions: dict[bool, list[str]] = {True: [], False: []}
    for document in read_documents(source, tokenizer=small_tokenizer):
        held_out = is_validation(document.text, fraction)
        questions[held_out] += re.findall(r"Question \d+\?", document.text)
    learned, held_out = set(questions[False]), set(questions[True])
    assert held_out and len(learned | held_out) == len(DIALOGUES)
    assert not learned & held_out
    # Each learned one in both places of a pair and alone, but for what of it would have been held out.
    counts = [questions[False].count(question) for question in learned]
    assert max(counts) == 3 and sum(counts) > 2.5 * len(counts)


def test_the_same_dialogues_give_the_same_conversations(corpus):
    found = list(conversations(corpus))
    assert list(arranged(found)) == list(arranged([*found, *found[:7]]))
    assert list(arranged(found[:1])) == found[:1]


@pytest.mark.parametrize("content", ["conversations: [", "categories: [a]", "[1, 2]", "conversations: 3"])
def test_a_file_that_is_no_corpus_is_named(corpus, content):
    (corpus / "c.yml").write_text(content, "utf-8")
    with pytest.raises(UserError, match=r"c\.yml holds no conversations") as caught:
        list(conversations(corpus))
    assert "\n" not in str(caught.value)
