"""`tercet tokenizer train`: what it learns from, what it holds out, what it reports."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tercet.tokenizer_commands import parse_size
from tercet.tokenizer_text import HELD_OUT
from tercet.training.errors import UserError
from tercet.training.split import is_validation


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Documents of two sources; those that are held out hold a word of their own."""
    documents = []
    for number in range(400):
        text = f"{number} the quick brown fox jumps over the lazy dog " * 3
        if is_validation(text, HELD_OUT):
            for attempt in range(1000):
                marked = text + f"zyzzyva{attempt} " + "zyzzyva " * 20
                if is_validation(marked, HELD_OUT):
                    text = marked
                    break
        documents.append({"text": text, "from": "even" if number % 2 == 0 else "odd", "body": "unlike text"})
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
    assert "zyzzyva" in path.read_text()
    return path


def test_documents_that_a_recipe_holds_out_are_not_learned_from(tercet, rows, tmp_path):
    shown = tercet("tokenizer", "train", "--data", rows, "--vocab-size", 300, "--output", tmp_path / "tok", "--report")
    assert shown.code == 0, shown.err
    assert "of held-out text" in shown.out
    tokens = AutoTokenizer.from_pretrained(tmp_path / "tok").get_vocab()
    assert not [token for token in tokens if "zyz" in token or "zzy" in token]
    report = json.loads((tmp_path / "tok" / "tokenizer_report.json").read_text())
    assert report["held_out"] is True
    held_out = sum(is_validation(json.loads(line)["text"], HELD_OUT) for line in rows.open())
    assert report["total"]["num_documents"] == held_out > 5


def test_report_by_source_beside_another_tokenizer(tercet, rows, tmp_path, small_tokenizer):
    small_tokenizer.save_pretrained(tmp_path / "other")
    shown = tercet(
        "tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "tok", "--source-column", "from",
        "--compare", tmp_path / "other",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    for part in (
        "Bytes per token",
        "Tokens per word",
        "other (1,024)",
        "even",
        "odd",
        "all of these",
        "Unused",
        "Longest",
    ):
        assert part in shown.out, part
    report = json.loads((tmp_path / "tok" / "tokenizer_report.json").read_text())
    assert set(report["sources"]) == {"even", "odd"}
    assert f"{report['sources']['odd']['bytes_per_token']['other']:.3f}" in shown.out


def test_without_report_there_is_one_line_and_no_file(tercet, rows, tmp_path):
    shown = tercet("tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "tok")
    assert shown.code == 0, shown.err
    assert len(shown.out.splitlines()) == 1
    assert not (tmp_path / "tok" / "tokenizer_report.json").exists()


@pytest.mark.parametrize("held_out", [False, True])
def test_one_document_is_learned_from_whatever_its_hash(tercet, tmp_path, held_out):
    texts = (f"only document number {number}" for number in range(1000))
    (tmp_path / "one.txt").write_text(next(text for text in texts if is_validation(text, HELD_OUT) is held_out))
    shown = tercet("tokenizer", "train", tmp_path / "one.txt", "--vocab-size", 261, "-o", tmp_path / "tok")
    assert shown.code == 0, shown.err
    assert "of the text that it was trained on" in shown.out


def test_a_budget_takes_a_sample_and_says_so(tercet, rows, tmp_path):
    shown = tercet("tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "tok", "--max-bytes", "20kB")
    assert shown.code == 0, shown.err
    assert "Trained on a sample by hash: 0.0 of 0.1 MB" in shown.out
    shown = tercet("tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "tok2", "--max-documents", 30)
    assert ", 30 of 3" in shown.out


def test_words(tercet, rows, tmp_path):
    command = ["tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "tok", "--words", "blanks"]
    assert tercet(*command).code == 0
    splitter = AutoTokenizer.from_pretrained(tmp_path / "tok").backend_tokenizer.pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str('x->y, "z"')] == ["x->y,", 'Ġ"z"']


def test_text_column(tercet, rows, tmp_path):
    command = ["tokenizer", "train", rows, "--vocab-size", 262, "-o", tmp_path / "tok"]
    assert tercet(*command, "--text-column", "body").code == 0
    learned = AutoTokenizer.from_pretrained(tmp_path / "tok").convert_ids_to_tokens([260, 261])
    assert all(token.replace("Ġ", " ") in "unlike text" for token in learned), learned


def test_a_recipe_brings_its_sources_and_gives_the_tokenizer_of_its_run(tercet, rows, tmp_path):
    """Columns by template, an answer of a conversation, bad rows and duplicates as the recipe has them."""
    chats = tmp_path / "chats.jsonl"
    turns = [[("user", f"what is {n} and one?"), ("assistant", f"it is {n + 1}, zebra {n}")] for n in range(60)]
    conversations = [[{"role": role, "content": content} for role, content in turn] for turn in turns]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations) + "no json\n")
    recipe = tmp_path / "recipe.yaml"
    data = {
        "on_bad_row": "skip",
        "sources": [
            {"path": str(rows), "text_template": "# {from}\n\n{text}"},
            {"path": str(chats), "messages_column": "messages"},
        ],
    }
    tokenizer = {"vocab_size": 330, "words": "blanks"}
    content = {"output_dir": "run", "data": data, "tokenizer": tokenizer, "training": {"num_steps": 4}}
    recipe.write_text(json.dumps(content), encoding="utf-8")

    shown = tercet("tokenizer", "train", "--recipe", recipe, "-o", tmp_path / "tok", "--report")
    assert shown.code == 0, shown.err
    assert f"{chats}: 1 left out, not JSON" in shown.out
    report = json.loads((tmp_path / "tok" / "tokenizer_report.json").read_text())
    assert report["held_out"] is True
    prepared = tercet("data", "prepare", recipe, "--output", tmp_path / "run")
    assert prepared.code == 0, prepared.err
    ours = (tmp_path / "tok" / "tokenizer.json").read_bytes()
    assert ours == (tmp_path / "run" / "tokenizer.json").read_bytes()
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert report["total"]["num_documents"] < sum(source["documents"] for source in manifest["by_source"].values()) / 5

    smaller = ["tokenizer", "train", "--recipe", recipe, "--set", "tokenizer.vocab_size=300", "--words", "llama3"]
    assert tercet(*smaller, "-o", tmp_path / "smaller").code == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "smaller")) == 300


def test_rows_that_cannot_be_used_end_it_or_are_counted(tercet, rows, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f'{rows.read_text()}no json\n{{"body": "zyzzyva"}}\n', encoding="utf-8")
    command = ["tokenizer", "train", bad, "--vocab-size", 300, "-o", tmp_path / "tok"]
    shown = tercet(*command)
    assert shown.code == 2
    assert "bad.jsonl, line 401 is not JSON" in shown.err
    assert not (tmp_path / "tok").exists()

    shown = tercet(*command, "--on-bad-row", "skip")
    assert shown.code == 0, shown.err
    assert f"{bad}: 1 left out, not JSON" in shown.out
    assert f"{bad}: 1 left out, without the column" in shown.out
    good = tercet("tokenizer", "train", rows, "--vocab-size", 300, "-o", tmp_path / "good")
    assert good.code == 0, good.err
    assert (tmp_path / "tok" / "tokenizer.json").read_bytes() == (tmp_path / "good" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to train on"),
        (["FILE", "--max-bytes", "many"], "--max-bytes 'many' is no size"),
        (["FILE", "--max-bytes", "100"], "too small a sample: give at least 16384"),
        (["FILE", "--compare", "no/such/folder/at/all"], "--compare no/such/folder/at/all: no tokenizer"),
        (["FILE", "--source-column", "missing"], "'missing'"),
        (["FILE", "--recipe", "demo"], "DATA and --recipe: the text is the recipe's"),
        (["--recipe", "demo", "--text-column", "body"], "--text-column and --recipe"),
        (["--recipe", "no_such_recipe"], "no recipe at no_such_recipe"),
        (["FILE", "--set", "tokenizer.vocab_size=300"], "overrides a recipe: name one with --recipe"),
        (["FILE", "--on-bad-row", "drop"], "--on-bad-row drop is not known: choose error or skip"),
        (
            ["FILE", "--words", "gpt2"],
            "--words: words='gpt2' is not known: choose one of llama3, bloom, clauses, blanks",
        ),
        (["FILE", "--vocab-size", "90000"], "--vocab-size: vocab_size=90000 is larger than the corpus supports"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(tercet, rows, tmp_path, arguments, says):
    words = [rows if word == "FILE" else word for word in arguments]
    shown = tercet("tokenizer", "train", *words, "--output", tmp_path / "tok")
    assert shown.code == 2
    assert says in shown.err and len(shown.err.splitlines()) == 1
    assert not (tmp_path / "tok").exists()


def test_a_damaged_tokenizer_to_compare_with_shows_before_any_text_is_read(tercet, tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    no_text = tmp_path / "missing.txt"
    shown = tercet("tokenizer", "train", no_text, "--compare", tmp_path / "cut", "--output", tmp_path / "tok")
    assert shown.code == 2
    assert f"--compare {tmp_path / 'cut'}: no tokenizer that AutoTokenizer loads" in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MB", 256_000_000), ("1.5GiB", 3 << 29), ("64 kB", 64_000), ("500_000", 500_000), ("2g", 2_000_000_000)],
)
def test_sizes(text, size):
    assert parse_size(text, "--max-bytes") == size


@pytest.mark.parametrize("text", ["", "MB", "-5", "5 apples", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="is no size"):
        parse_size(text, "--max-bytes")


def test_torch_stays_out_of_the_budget(rows, tmp_path, small_tokenizer):
    """Its 250 MB would be a quarter of the gigabyte that the command keeps below."""
    small_tokenizer.save_pretrained(tmp_path / "other")
    words = ["tokenizer", "train", str(rows), "--vocab-size", "300", "-o", str(tmp_path / "tok"), "--report"]
    code = (
        "import sys; from tercet.cli import app\n"
        f"try: app({[*words, '--compare', str(tmp_path / 'other')]!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tok" / "tokenizer.json").is_file()
