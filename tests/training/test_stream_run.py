"""Runs that train on a stream: what they read, what they leave, and how they go on."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from forked_runs import train_through_kills
from resumed_runs import assert_same_run, dying_step, silently, train_until_killed
from streamed_runs import FRACTION, distinct_texts, trained_texts, write_shards
from transformers import AutoModelForCausalLM, AutoTokenizer

import tercet.training.loop as loop_module
from tercet.training import stream_files
from tercet.training.checkpoints import list_checkpoints
from tercet.training.documents import DataError
from tercet.training.errors import UserError
from tercet.training.pipeline import train
from tercet.training.results import RunResults
from tercet.training.split import is_validation
from tercet.training.token_set import PreparedData


@pytest.fixture(scope="module")
def texts(small_corpus) -> list[str]:
    return distinct_texts(small_corpus)


@pytest.fixture(scope="module")
def shards(texts, tmp_path_factory) -> Path:
    """150 documents in five files."""
    return write_shards(tmp_path_factory.mktemp("stream"), texts, 5)


@pytest.fixture
def stream_recipe(make_recipe, shards):
    """A recipe that reads more than an epoch of the stream, with global batches that grow."""

    def make(path=shards, data=(), **training):
        return make_recipe(
            data={
                "path": str(path), "stream": True, "stream_sample_mb": 0.01, "validation_fraction": FRACTION,
                **dict(data),
            },
            training={
                "num_steps": 12, "sequence_length": 128, "global_batch_size": 16, "evaluate_every": 6, "save_every": 3,
                "batch_size_warmup": [{"until_step": 2, "global_batch_size": 4}], **training,
            },
        )  # fmt: skip

    return make


def positions(folder: Path) -> list[dict]:
    """Where each process stood at the last checkpoint."""
    state = list_checkpoints(folder)[-1] / "state"
    return [json.loads(path.read_text()) for path in sorted(state.glob("stream-*.json"))]


def test_a_run_trains_evaluates_and_loads(stream_recipe, texts, tmp_path):
    said = []
    outcome = train(stream_recipe(), output_dir=tmp_path / "run", say=said.append)
    model, tokenizer = (kind.from_pretrained(tmp_path / "run") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("The module", return_tensors="pt")).logits.isfinite().all()
    # The validation split is of the sample, and is what the hash says.
    prepared = PreparedData.open(tmp_path / "run" / "data")
    held_out = [
        tokenizer.decode(prepared.validation.tokens(i, 0, length - 1).tolist())
        for i, length in enumerate(prepared.validation.document_lengths.tolist())
    ]
    sampled = prepared.report.documents
    assert 30 < sampled < len(texts)
    assert held_out and all(text in texts and is_validation(text, FRACTION) for text in held_out)
    assert prepared.report.bytes == pytest.approx(10_000, rel=0.1)
    # What was trained on is counted, and as much of it as the steps took but for the document at the end.
    results = RunResults.load(tmp_path / "run" / "results.json")
    assert results.evaluation is not None and results.evaluation.num_bytes == prepared.validation.num_bytes
    assert results.training.epochs is None
    assert results.data.stream is not None
    assert results.data.stream.whole_epochs == {str(stream_recipe().data.path): 1}
    assert len(trained_texts(texts)) < results.data.train.documents < 2 * len(trained_texts(texts))
    assert len(texts) - len(trained_texts(texts)) <= results.data.stream.held_out
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"]) + 1
    assert 0 <= results.training.tokens_seen - results.data.train.tokens < longest
    assert outcome.loop is not None and outcome.loop.state.tokens_seen == (2 * 4 + 10 * 16) * 128
    lines = "\n".join(said)
    assert "5 shards, read while training" in lines
    assert re.search(rf"Sample     {sampled} documents, 0.01 MB", lines)
    assert re.search(r"Read       \S+: \d+ documents read, .*; \d+ held out, 1 time to the end", lines)


@pytest.fixture(scope="module")
def stream_untouched():
    """Folder of the run that nothing has stopped, once it is made."""
    return {}


@pytest.fixture
def untouched_run(stream_recipe, stream_untouched, tmp_path_factory) -> Path:
    if "folder" not in stream_untouched:
        stream_untouched["folder"] = tmp_path_factory.mktemp("runs") / "untouched"
        train(stream_recipe(), output_dir=stream_untouched["folder"], say=silently)
    return stream_untouched["folder"]


@pytest.mark.parametrize("dies_in", [2, 8, 12])
def test_a_killed_run_ends_with_the_bits_of_an_untouched_one(stream_recipe, untouched_run, tmp_path, dies_in):
    """Before the first checkpoint, and in the first epoch of the stream and the second."""
    train_until_killed(stream_recipe(), tmp_path / "run", dies_in)
    train(stream_recipe(), output_dir=tmp_path / "run", say=silently)
    assert_same_run(tmp_path / "run", untouched_run)
    assert positions(tmp_path / "run") == positions(untouched_run) != []
    ours, theirs = (RunResults.load(folder / "results.json") for folder in (tmp_path / "run", untouched_run))
    assert ours.data == theirs.data


@pytest.mark.slow  # six runs, of which four are killed
def test_kill_9_at_any_moment(stream_recipe, tmp_path):
    recipe = stream_recipe(
        num_steps=60, save_every=1, evaluate_every=60, keep_last=3, sequence_length=32, global_batch_size=4
    )
    train_through_kills(recipe, tmp_path / "killed")
    train(recipe, output_dir=tmp_path / "untouched", say=silently)
    assert_same_run(tmp_path / "killed", tmp_path / "untouched")
    assert positions(tmp_path / "killed") == positions(tmp_path / "untouched")


def test_a_branch_goes_on_in_the_stream_where_it_left(stream_recipe, untouched_run, tmp_path):
    branch = untouched_run / "checkpoints" / "step-00000009"
    train(stream_recipe(branch_from=str(branch)), output_dir=tmp_path / "run", say=silently)
    assert positions(tmp_path / "run") == positions(untouched_run)


class TestTextThatHasChanged:
    @pytest.fixture
    def begun(self, stream_recipe, shards, tmp_path):
        """A copy of the text, and a recipe whose run died on it behind a checkpoint."""
        copied = shutil.copytree(shards, tmp_path / "text")
        train_until_killed(stream_recipe(copied), tmp_path / "run", 5)
        return copied, stream_recipe(copied)

    @staticmethod
    def rewrite(path: Path) -> None:
        """Other text of the same length, in the middle."""
        content = bytearray(path.read_bytes())
        at = len(content) // 2
        content[at] = ord("x") if content[at] != ord("x") else ord("y")
        path.write_bytes(content)

    @staticmethod
    def rewrite_in_hiding(path: Path) -> None:
        """The same, and the time of writing is put back."""
        state = path.stat()
        TestTextThatHasChanged.rewrite(path)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda folder: (folder / "00.jsonl").open("a").write('{"text": "one more"}\n'), r"00\.jsonl has [\d,]+ b"),
            (lambda folder: TestTextThatHasChanged.rewrite(folder / "03.jsonl"), r"03\.jsonl has another content, "),
            (lambda folder: TestTextThatHasChanged.rewrite_in_hiding(folder / "03.jsonl"), r"03\.jsonl has another c"),
            (lambda folder: (folder / "04.jsonl").unlink(), r"04\.jsonl is gone, "),
            (lambda folder: shutil.copy(folder / "04.jsonl", folder / "05.jsonl"), r"05\.jsonl is new, "),
        ],
        ids=["longer", "inside", "inside, its time put back", "gone", "new"],
    )
    def test_is_named_and_not_gone_on_with(self, begun, tmp_path, change, told):
        copied, recipe = begun
        shutil.copytree(copied, tmp_path / "kept")
        change(copied)
        with pytest.raises(UserError, match=rf"{copied}/{told}.*Restore the file.*--restart") as caught:
            train(recipe, output_dir=tmp_path / "run", say=silently)
        assert "\n" not in str(caught.value)
        # Restored, though with other times, it is what it was, and what the refusal has left is whole.
        shutil.rmtree(copied)
        shutil.copytree(tmp_path / "kept", copied, copy_function=shutil.copyfile)
        train(recipe, output_dir=tmp_path / "run", say=silently)
        assert RunResults.load(tmp_path / "run" / "results.json").training.num_steps == 12

    def test_a_copy_of_the_text_is_gone_on_with(self, begun, tmp_path):
        """As on another machine: other times and other files, the same content. It ends with the bits that it would."""
        copied, recipe = begun
        shutil.copytree(tmp_path / "run", tmp_path / "stayed")
        train(recipe, output_dir=tmp_path / "stayed", say=silently)
        shutil.copytree(copied, tmp_path / "moved", copy_function=shutil.copyfile)
        shutil.rmtree(copied)
        (tmp_path / "moved").rename(copied)
        train(recipe, output_dir=tmp_path / "run", say=silently)
        assert_same_run(tmp_path / "run", tmp_path / "stayed")
        # Noted with their new times, they are not hashed again the next time.
        record = json.loads((tmp_path / "run" / "data" / "stream.json").read_text())
        files = sorted(copied.iterdir())
        assert [fields[2] for fields in record["files"][str(copied)]] == [path.stat().st_mtime_ns for path in files]
        noted = [stream_files.StreamFile(*fields)._replace(sha256="noted") for fields in record["files"][str(copied)]]
        assert stream_files.look_at(files, noted) == tuple(noted)

    def test_of_files_too_large_to_hash_the_time_decides(self, begun, tmp_path, monkeypatch):
        monkeypatch.setattr(stream_files, "MAX_HASHED_BYTES", 1000)
        copied, recipe = begun
        train_until_killed(recipe, tmp_path / "large", 5)
        shutil.copytree(tmp_path / "large", tmp_path / "refused")
        train(recipe, output_dir=tmp_path / "large", say=silently)
        (copied / "02.jsonl").touch()
        with pytest.raises(UserError, match=r"02\.jsonl was written at another time \(cp -p and rsync -t keep"):
            train(recipe, output_dir=tmp_path / "refused", say=silently)


class TestRowsThatCannotBeUsed:
    @pytest.fixture
    def broken(self, texts, tmp_path) -> Path:
        """A line that is no JSON, in the middle of the second file."""
        folder = write_shards(tmp_path / "text", texts, 2)
        lines = (folder / "01.jsonl").read_text().splitlines(keepends=True)
        (folder / "01.jsonl").write_text("".join([*lines[:60], "no json\n", *lines[60:]]))
        return folder

    def test_end_the_run_with_their_place_and_the_checkpoint(self, stream_recipe, broken, tmp_path):
        with pytest.raises(
            DataError, match=r"01\.jsonl, line 61 is not JSON.*on_bad_row: skip.*goes on from \S+step-0000000\d"
        ):
            train(stream_recipe(broken), output_dir=tmp_path / "run", say=silently)
        assert list_checkpoints(tmp_path / "run")

    def test_are_counted_once_an_epoch_over_a_kill(self, stream_recipe, broken, tmp_path):
        recipe, said = stream_recipe(broken, data={"on_bad_row": "skip"}), []
        train_until_killed(recipe, tmp_path / "run", 8)
        train(recipe, output_dir=tmp_path / "run", say=said.append)
        results = RunResults.load(tmp_path / "run" / "results.json")
        assert results.data.stream is not None
        whole = max(results.data.stream.whole_epochs.values())
        assert whole == 1 and results.data.stream.left_out in (whole, whole + 1)
        assert any("01.jsonl, line 61 is not JSON" in line for line in said)


def test_the_offending_document_is_named_by_file_and_line(stream_recipe, texts, tmp_path, monkeypatch):
    """A character that one document alone has breaks the loss."""
    changed = [f"{text} \u2603" if text.startswith("Document 33.") else text for text in texts]
    assert not is_validation(changed[33], FRACTION)
    folder = write_shards(tmp_path / "text", changed, 5)
    recipe = stream_recipe(folder, max_bad_steps=0)
    recipe = recipe.model_copy(update={"model": {**recipe.model, "tie_word_embeddings": False}})

    def poison(model):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
        with torch.no_grad():
            model.model.embed_tokens.weight[tokenizer("\u2603")["input_ids"][-1]] = float("nan")

    monkeypatch.setattr(loop_module, "training_step", dying_step(100, poison))
    with pytest.raises(UserError, match=r"not finite in \S+03\.jsonl, line 7 \('"):
        train(recipe, output_dir=tmp_path / "run", say=silently)


def test_a_sample_that_holds_nothing_out_says_so(stream_recipe, tmp_path):
    with pytest.raises(DataError, match=r"none of the \d+ documents .*sample.*raise data.validation_fraction"):
        train(stream_recipe(data={"validation_fraction": 1e-9}), output_dir=tmp_path / "run", say=silently)
    assert not (tmp_path / "run").exists()
