import gzip
import json
import lzma
import os
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from tercet.training.sources import DataError, Source, read_documents


def texts(path: object, **settings: object) -> list[str]:
    return [document.text for document in read_documents(Source.model_validate({"path": str(path), **settings}))]


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    "content", ["a\r\nb\r\n", "\ufeffmark\n", "no\nend", "end\n\n\n", "a\rb", "\u2028\x0c\x85é🙂\n"]
)
@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)]
)
def test_a_text_file_comes_back_byte_for_byte(tmp_path: Path, content: str, suffix: str, compress):
    path = written(tmp_path / f"text.md{suffix}", compress(content.encode()))
    assert texts(path) == [content]


def test_jsonl_rows_are_read_as_they_are(tmp_path: Path):
    rows = ["a\r\nb", "2020-01-01", "007", "", None, "é"]
    lines = [json.dumps({"body": row, "n": i if i else "x"}) for i, row in enumerate(rows)]
    content = b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode()
    expected = ["a\r\nb", "2020-01-01", "007", "é"]
    assert texts(written(tmp_path / "a.jsonl", content), text_column="body") == expected
    assert texts(written(tmp_path / "a.jsonl.gz", gzip.compress(content)), text_column="body") == expected
    array = json.dumps([{"body": row} for row in rows], indent=1).encode()
    assert texts(written(tmp_path / "a.json", array), text_column="body") == expected
    assert texts(written(tmp_path / "b.json", content), text_column="body") == expected


def test_tables_are_read_through_datasets_without_a_copy_in_its_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    csv = written(tmp_path / "a.csv", b'text,n\r\n"a\r\nb",1\r\nNA,2\r\n,3\r\n007,4\r\n')
    assert texts(csv) == ["a\r\nb", "NA", "007"]
    assert texts(written(tmp_path / "a.csv.gz", gzip.compress(csv.read_bytes()))) == ["a\r\nb", "NA", "007"]
    pyarrow.parquet.write_table(pyarrow.table({"t": ["x\r\n", None, "y"]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", text_column="t") == ["x\r\n", "y"]
    assert not list(tmp_path.glob("cache/**/*.arrow"))


def test_folders_and_globs_in_a_fixed_order(tmp_path: Path):
    for name in ("b.txt", "a/z.md", "a/c.jsonl", ".hidden/x.txt", "skipped.py", "empty.txt"):
        content = b"" if name == "empty.txt" else json.dumps({"text": name}).encode()
        written(tmp_path / name, content)
    assert texts(tmp_path) == ["a/c.jsonl", '{"text": "a/z.md"}', '{"text": "b.txt"}']
    assert texts(tmp_path / "**" / "*.py") == ['{"text": "skipped.py"}']
    assert {d.source for d in read_documents(Source(path=str(tmp_path)))} == {str(tmp_path)}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets_get_the_settings_of_the_source(monkeypatch, streaming: bool):
    def load_dataset(path, name, *, split, revision, streaming):
        assert (path, name, split, revision) == ("owner/name", "en", "test", "v1")
        rows = datasets.Dataset.from_dict({"text": ["a", "b"], "other": [1, 2]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = {"name": "en", "split": "test", "revision": "v1", "streaming": streaming}
    assert texts("owner/name", **settings) == ["a", "b"]
    with pytest.raises(DataError, match=r"row 1 has no column 'content'; it has 'text', 'other'\. Set text_column"):
        texts("owner/name", text_column="content", **settings)


def test_a_hub_failure_is_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"no file or folder here.*Couldn't reach the Hub\. Check the name") as caught:
        texts("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 \(byte 0xe9 at byte 3\)\. Convert"),
        ("binary.txt", b"ab\0", r"binary\.txt holds a NUL byte \(at byte 2\)"),
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("empty.csv", b"", r"empty\.csv is empty"),
        ("rows.jsonl", b'{"text": null}\n', r"rows\.jsonl is empty"),
        ("torn.txt.gz", gzip.compress(os.urandom(1000))[:500], r"torn\.txt\.gz is a broken \.gz file"),
        ("torn.txt.zst", zstd(os.urandom(1000))[:500], r"torn\.txt\.zst is a broken \.zst file"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"bad\.jsonl, line 2 is not JSON: Expecting ',' delimiter at"),
        (
            "latin.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            r"latin\.jsonl, line 2 is not UTF-8 \(byte 10 of",
        ),
        ("nul.jsonl", b'{"text": "a\0"}\n', r"nul\.jsonl, line 1 holds a NUL byte"),
        (
            "column.jsonl",
            b'{"body": "a", "n": 1}',
            r"line 1 has no column 'text'; it has 'body', 'n'\. Set text_column",
        ),
        ("column.csv", b"body,n\na,1\n", r"row 2 has no column 'text'; it has 'body', 'n'\. Set"),
        ("list.jsonl", b'["a"]', r"line 1 holds a list, not an object with the key 'text'"),
        ("number.jsonl", b'{"text": 7}', r"line 1: column 'text' holds a int, not text"),
        ("half.jsonl", b'{"text": "a\\ud800"}', r"line 1: the text holds a lone surrogate \(U\+D800 at character 1\)"),
        ("bad.parquet", b"PAR1", r"bad\.parquet cannot be read as parquet"),
        ("folder/x.bin", b"x", r"folder.* holds no file that can be read"),
    ],
)
def test_what_cannot_be_read_gets_one_line(tmp_path: Path, name: str, content: bytes, message: str):
    path = written(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        texts(path.parent if path.suffix == ".bin" else path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.txt", "a/b/c", "./data", "/nowhere"])
def test_a_missing_path_is_no_hub_dataset(path: str):
    with pytest.raises(DataError, match="does not exist"):
        texts(path)


def test_a_glob_that_matches_nothing(tmp_path: Path):
    with pytest.raises(DataError, match="No file matches"):
        texts(tmp_path / "*.txt")


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValidationError, match="colum"):
        Source.model_validate({"path": "x", "text_colum": "y"})


def test_the_default_corpus_has_a_name():
    assert next(iter(read_documents(Source(path="python-docs")))).source == "python-docs"
