"""`tercet data ...` as a user runs it."""

import json
import shutil
from pathlib import Path

import pytest

from small_runs import small_settings


@pytest.fixture
def folder_of_texts(small_corpus, tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, text in enumerate(small_corpus[:30]):
        (folder / f"{index:02d}.txt").write_text(text[:3000], encoding="utf-8")
    return folder


@pytest.fixture
def settings(folder_of_texts) -> list[str]:
    changes = ("data.split_by=document", "data.validation_fraction=0.2")
    return small_settings(f"data.path={folder_of_texts}", *changes)


def test_parts_are_prepared_merged_shown_and_trained_on(tercet, settings, tmp_path):
    parts = [tmp_path / f"part{i}" for i in range(2)]
    for i, part in enumerate(parts):
        shown = tercet("data", "prepare", "shakespeare", *settings, "--output", part, "--shard", f"{i}/2")
        assert shown.code == 0, shown.err
        assert f"part {i} of 2" in shown.out
    run = tmp_path / "run"
    shown = tercet("data", "merge", parts[1], parts[0], "--output", run)
    assert shown.code == 0, shown.err
    assert "2 parts, 30 documents" in shown.out
    held = {path.name: path.stat().st_mtime_ns for path in (run / "data").iterdir()}
    picture = tmp_path / "data.png"
    shown = tercet("data", "info", run, "--plot", picture)
    assert shown.code == 0, shown.err
    assert "30 documents" in shown.out
    assert "merged from 2 parts" in shown.out
    assert "rows of 32 tokens" in shown.out
    assert picture.is_file()
    shown = tercet("train", "shakespeare", *settings, "--output", run)
    assert shown.code == 0, shown.err
    assert {path.name: path.stat().st_mtime_ns for path in (run / "data").iterdir()} == held


def test_a_part_goes_into_a_folder_of_its_own(tercet, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = tercet("data", "prepare", "shakespeare", *settings, "--set", "output_dir=out/x", "--shard", "1/2")
    assert shown.code == 0, shown.err
    manifest = json.loads((tmp_path / "out" / "x-1-of-2" / "data" / "manifest.json").read_text())
    assert manifest["settings"]["part"] == [1, 2]


@pytest.mark.parametrize(
    ("shard", "message"),
    [("2/2", "numbered from 0 to 1"), ("1", "expected i/n"), ("a/b", "expected i/n"), ("-1/2", "expected i/n")],
)
def test_a_part_that_is_none_is_one_line(tercet, settings, tmp_path, shard, message):
    shown = tercet("data", "prepare", "shakespeare", *settings, "--output", tmp_path / "run", f"--shard={shard}")
    assert shown.code == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_part_is_one_line_and_leaves_nothing(tercet, settings, tmp_path):
    part = tmp_path / "part"
    assert tercet("data", "prepare", "shakespeare", *settings, "--output", part, "--shard", "0/3").code == 0
    shown = tercet("data", "merge", part, "--output", tmp_path / "run")
    assert shown.code == 2
    assert "2 of 3 parts are missing: 1/3, 2/3" in shown.err
    assert not (tmp_path / "run").exists()


def test_bad_text_leaves_nothing(tercet, tmp_path):
    (tmp_path / "bad.jsonl").write_text("no json\n")
    settings = small_settings(f"data.path={tmp_path / 'bad.jsonl'}")
    shown = tercet("data", "prepare", "shakespeare", *settings, "--output", tmp_path / "run")
    assert shown.code == 2
    assert not (tmp_path / "run").exists()


def test_a_set_of_another_tokenizer_is_replaced_and_that_is_said(tercet, settings, tmp_path):
    prepare = ("data", "prepare", "shakespeare", *settings, "--output", tmp_path / "run")
    assert "Replacing" not in tercet(*prepare).out
    assert "Replacing" not in tercet(*prepare).out
    manifest = tmp_path / "run" / "data" / "manifest.json"
    before = json.loads(manifest.read_text())["settings"]
    shown = tercet(*prepare, "--set", "tokenizer.vocab_size=280")
    assert shown.code == 0, shown.err
    assert "Replacing" in shown.out and "made with other settings (tokenizer, vocab_size)" in shown.out
    after = json.loads(manifest.read_text())["settings"]
    assert [key for key in before if before[key] != after[key]] == ["tokenizer", "vocab_size"]


def test_info_of_a_finished_run(tercet, checkpoint):
    shown = tercet("data", "info", checkpoint)
    assert shown.code == 0, shown.err
    assert "rows of 32 tokens" in shown.out
    assert "│" in shown.out
    again = tercet("data", "info", checkpoint / "data")
    assert "rows of 32 tokens" in again.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cut", "shard-00000.bin has"),
        ("manifest", "holds no finished prepared data"),
        ("picture", "ends in .png"),
        ("folder", "is no folder"),
        ("row", "There is no row"),
    ],
)
def test_what_cannot_be_shown_is_one_line(tercet, checkpoint, tmp_path, change, message):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    more = []
    if change == "cut":
        (copy / "data" / "shard-00000.bin").write_bytes(b"")
    elif change == "manifest":
        (copy / "data" / "manifest.json").unlink()
    elif change == "picture":
        more = ["--plot", tmp_path / "data.jpg"]
    elif change == "row":
        more = ["--row", 10_000_000]
    shown = tercet("data", "info", tmp_path / "none" if change == "folder" else copy, *more)
    assert shown.code == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1
