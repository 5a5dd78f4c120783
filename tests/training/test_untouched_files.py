"""Prepared data whose files nobody has touched is taken without reading them, and whatever was touched is read."""

import copy
import os
import shutil
from pathlib import Path

import pytest

from tercet.tokenizer import train_tokenizer
from tercet.training import untouched_files
from tercet.training.merge import merge
from tercet.training.preparation import make_data

NUM_FILES, FILE_BYTES = 4, 200_000


@pytest.fixture
def folder(small_corpus, tmp_path) -> Path:
    """Files of one long document each."""
    book = " ".join(small_corpus).encode("ascii", "ignore")[:FILE_BYTES]
    (tmp_path / "text").mkdir()
    for number in range(NUM_FILES):
        (tmp_path / "text" / f"{number}.txt").write_bytes(f"{number} ".encode() + book)
    return tmp_path / "text"


@pytest.fixture
def prepared(folder, make_recipe, small_tokenizer, tmp_path, monkeypatch):
    """Prepares the folder once, as if its files were old; then a function that does so again, with changes.

    It returns the data, the bytes that this process read meanwhile, and what was said.
    """
    monkeypatch.setattr(untouched_files, "_SETTLED_AFTER_NS", 0)

    def again(tokenizer=small_tokenizer, part=None, **data):
        recipe = make_recipe(data={"path": str(folder), "split_by": "tail", **data})
        said, before = [], bytes_read()
        made = make_data(recipe, tokenizer, tmp_path / "run", said.append, progress=False, workers=1, part=part)
        return made, bytes_read() - before, said

    assert again()[1] > NUM_FILES * FILE_BYTES
    return again


def bytes_read() -> int:
    """What this process has read so far, of any file."""
    counters = Path("/proc/self/io")
    if not counters.is_file():
        pytest.skip("needs Linux to tell what a process reads")
    return int(counters.read_text().split("rchar: ")[1].split()[0])


def put_in_its_place(path: Path, content: bytes) -> None:
    """Other content under the same name and with the same times of access and writing."""
    state = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(content)
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(path)


def write_inside(path: Path, content: bytes) -> None:
    """The same, in the same file."""
    state = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_untouched_files_are_not_read(prepared):
    data, num_bytes, said = prepared()
    assert num_bytes < FILE_BYTES
    assert data.report.documents == NUM_FILES
    assert said[0].startswith("Data ") and "4 documents" in said[0]


@pytest.mark.parametrize("replace", [put_in_its_place, write_inside])
def test_a_change_that_hides_its_size_and_time_is_read(prepared, folder, replace):
    before, _, _ = prepared()
    path = folder / "2.txt"
    replace(path, path.read_bytes().replace(b"statement", b"STATEMENT"))
    data, num_bytes, _ = prepared()
    assert num_bytes > NUM_FILES * FILE_BYTES
    assert data.fingerprint != before.fingerprint
    assert prepared()[0].fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("change", "num_documents"),
    [
        (lambda folder: shutil.copy2(folder / "0.txt", folder / "4.md"), NUM_FILES),  # a duplicate, dropped
        (lambda folder: (folder / "4.txt").write_text("one more"), NUM_FILES + 1),
        (lambda folder: (folder / "3.txt").unlink(), NUM_FILES - 1),
        (lambda folder: (folder / "3.txt").rename(folder / "4.txt"), NUM_FILES),
        (lambda folder: (folder / "3.txt").touch(), NUM_FILES),
    ],
    ids=["a copy more", "one more", "one less", "another name", "touched"],
)
def test_a_folder_that_changes_is_read(prepared, folder, change, num_documents):
    change(folder)
    data, num_bytes, _ = prepared()
    assert num_bytes > (NUM_FILES - 1) * FILE_BYTES
    assert data.report.documents == num_documents


def test_other_settings_and_another_tokenizer_read(prepared, small_corpus, small_tokenizer):
    other = copy.deepcopy(small_tokenizer)
    other.chat_template = "{{ messages }}"  # which decides the tokens of conversations, and is no part of the hash
    assert prepared(other)[1] > NUM_FILES * FILE_BYTES
    for changes in ({"min_chars": 5}, {"drop_duplicates": False}, {"validation_fraction": 0.3}, {"part": (0, 1)}):
        assert prepared(**changes)[1] > NUM_FILES * FILE_BYTES, changes
        assert prepared(**changes)[1] < FILE_BYTES, changes
    other = train_tokenizer(small_corpus[:10], vocab_size=300)
    assert prepared(other)[0].settings["vocab_size"] == 300
    assert prepared(small_tokenizer)[0].settings["vocab_size"] == 1024


def test_a_set_that_is_not_whole_is_made_anew(prepared, tmp_path):
    whole, _, _ = prepared()
    (shard,) = (tmp_path / "run" / "data").glob("shard-*.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    data, num_bytes, _ = prepared()
    assert num_bytes > NUM_FILES * FILE_BYTES
    assert shard.read_bytes() == content and data.fingerprint == whole.fingerprint


def test_files_that_were_just_written_are_read_again(prepared, folder, monkeypatch):
    """Within a tick of the file system's clock a second write shows in no time."""
    monkeypatch.setattr(untouched_files, "_SETTLED_AFTER_NS", 10**15)
    assert prepared()[1] > NUM_FILES * FILE_BYTES
    monkeypatch.setattr(untouched_files, "_SETTLED_AFTER_NS", 0)
    assert prepared()[1] > NUM_FILES * FILE_BYTES  # nothing was noted while they were new
    assert prepared()[1] < FILE_BYTES


def test_a_merged_set_needs_none_of_its_text(prepared, folder, tmp_path):
    """It may lie on a machine that has never had it."""
    for number in range(2):
        prepared(part=(number, 2))
        shutil.move(tmp_path / "run" / "data", tmp_path / f"part-{number}")
    merged = merge([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "run" / "data")
    shutil.rmtree(folder)
    assert prepared()[0].fingerprint == merged.fingerprint
    assert prepared()[0].report.documents == NUM_FILES
    assert not (tmp_path / "run" / "data" / "files.json").exists()


@pytest.mark.parametrize("changes", [{"min_chars": 5}, {"drop_duplicates": False}, {"validation_fraction": 0.3}])
def test_one_other_setting_reads(prepared, changes):
    assert prepared()[1] < FILE_BYTES
    assert prepared(**changes)[1] > NUM_FILES * FILE_BYTES
