import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tercet.training import files
from tercet.training.sources import DataError, SkipReport, Source, read_documents


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 \(byte 0xe9 at byte 3\)\. Convert"),
        ("binary.txt", b"ab\0", r"binary\.txt holds a NUL byte \(at byte 2\)"),
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("empty.csv", b"", r"empty\.csv is empty"),
        ("rows.jsonl", b'{"text": null}\n', r"rows\.jsonl is empty"),
        (
            "torn.txt.gz",
            gzip.compress(os.urandom(1000))[:500],
            r"torn\.txt\.gz cannot be read, as the \.gz file is broken or cut short: Compressed file ended",
        ),
        (
            "torn.txt.zst",
            zstd(os.urandom(1000))[:500],
            r"torn\.txt\.zst cannot be read, as the \.zst file is broken or cut short",
        ),
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
        ("string.jsonl", b'"a"', r"line 1 holds a str, not an object with the key 'text'"),
        ("deep.jsonl", b"[" * 100_000, r"line 1 is not JSON: maximum recursion depth exceeded"),
        ("digits.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"line 1 is not JSON: Exceeds the limit"),
        ("escaped.jsonl", b'{"text": "ab\\u0000"}', r"line 1 has a NUL character in its text \(at character 2\)"),
        ("latin.json", b'[\n{"text": "\xe9"}\n]', r"latin\.json is not UTF-8 \(byte 12 of the file\)"),
        ("latin.csv", b"text,n\nb,1\ncaf\xe9,2\n", r"latin\.csv, row 3 is not UTF-8\. Convert"),
        ("wide.csv", b"text,n\na, b,1\n", r"wide\.csv, row 2 has 3 fields where the first row has 2\. Mend"),
        (
            "open.csv",
            b'text,n\na,1\n"b,1\nc,2\n',
            r"open\.csv, row 3 \(line 3 to 4\) is not CSV: unexpected end of data",
        ),
        ("a.parquet.gz", b"x", r"is a Parquet file inside \.gz.*Decompress it with gzip -d"),
        ("texts.zip", b"PK", r"texts\.zip is an archive\. Unpack it"),
        ("number.jsonl", b'{"text": 7}', r"line 1 holds a int in column 'text', not text"),
        ("half.jsonl", b'{"text": "a\\ud800"}', r"line 1 has a lone surrogate in its text \(U\+D800 at character 1\)"),
        ("bad.parquet", b"PAR1", r"bad\.parquet, row 1 cannot be read as parquet"),
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


def _jsonl(rows: list[str]) -> bytes:
    return b"".join(json.dumps({"text": row}).encode() + b"\n" for row in rows)


def _csv(rows: list[str]) -> bytes:
    return b"text\n" + b"".join(b'"' + row.replace('"', '""').encode() + b'"\n' for row in rows)


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)]
)
@pytest.mark.parametrize(("kind", "write"), [(".jsonl", _jsonl), (".csv", _csv)])
def test_rows_come_through_every_compression_alone_in_a_folder_and_by_a_glob(
    tmp_path: Path, kind: str, write, suffix: str, compress
):
    rows = ['a "b", c', "d\n\ne\r\nf", "é🙂", "x" * 600_000]  # the last is longer than what is read at once
    path = written(tmp_path / "in" / f"rows{kind}{suffix}", compress(write(rows)))
    assert texts(path) == texts(path.parent) == texts(path.parent / f"*{kind}*") == rows


def test_a_compressed_file_may_be_several_one_behind_the_other(tmp_path: Path):
    for suffix, compress in ((".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)):
        content = compress(_jsonl(["a", "b"])) + compress(_jsonl(["c"]))
        assert texts(written(tmp_path / f"a.jsonl{suffix}", content)) == ["a", "b", "c"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_text_file_can_be_a_document_a_line(tmp_path: Path, suffix: str):
    content = "\ufeffone\r\n\n  two \r\nthree\u2028still\x0cthree\n\r\nlast".encode()
    path = written(tmp_path / f"a.txt{suffix}", gzip.compress(content) if suffix else content)
    skips = SkipReport()
    found = [d.text for d in read_documents(Source(path=str(path), documents="lines"), skips=skips)]
    assert found == ["one", "  two ", "three\u2028still\x0cthree", "last"]
    assert skips.count(reason="empty") == skips.count() == 2


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=12),
    chunk=st.integers(1, 9),
)
def test_lines_are_what_stands_between_newlines_whatever_the_chunk(tmp_path_factory, lines: list[bytes], chunk: int):
    path = written(tmp_path_factory.mktemp("lines") / "a.txt", b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CHUNK_BYTES", chunk)
        found = list(files.read_lines(path))
    expected = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


def test_parquet_gives_conversations_templates_and_every_row_group(tmp_path: Path):
    rows = {"a": [f"a{i}" for i in range(1000)], "b": list(range(1000)), "blob": [b"\xff"] * 1000}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet", row_group_size=300)
    assert texts(tmp_path / "a.parquet", text_template="{a}: {b}") == [f"a{i}: {i}" for i in range(1000)]
    with pytest.raises(DataError, match=r"row 1 has no column 'text'; it has 'a', 'b', 'blob'"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1 holds a bytes in column 'blob', not text.*1,000 rows, 1,000 cannot"):
        texts(tmp_path / "a.parquet", text_column="blob")


def test_a_hub_dataset_is_labelled_by_all_that_chooses_it():
    assert Source(path="owner/name").label == "owner/name"
    assert Source(path="owner/name", name="fr", split="test", revision="v1").label == "owner/name:fr[test]"


def test_columns_of_plain_text_are_refused(tmp_path: Path):
    path = written(tmp_path / "a.txt", b"x")
    with pytest.raises(DataError, match=r"a\.txt is read as plain text, which has no columns\. Remove text_template"):
        texts(path, text_template="{title}")
    with pytest.raises(DataError, match="Remove messages_column"):
        texts(path, messages_column="messages")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_template": "{a}", "messages_column": "m"}, "text_template and messages_column both say"),
        ({"text_template": "{a}", "text_column": "t"}, "text_template and text_column both say"),
        ({"text_template": "no column"}, "it names no column"),
        ({"min_chars": 5, "max_chars": 4}, r"min_chars \(5\) is more than max_chars \(4\)"),
        ({"weight": 0}, "greater than 0"),
        ({"weight": float("inf")}, "finite"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        Source.model_validate({"path": "x", **fields})


@pytest.mark.parametrize("kind", ["lines", "jsonl", "csv"])
def test_memory_stays_flat_however_many_rows_a_file_has(tmp_path: Path, kind: str):
    row = {"lines": b"%d some words\n", "jsonl": b'{"text": "%d some words"}\n', "csv": b'"%d some words"\n'}[kind]
    path = tmp_path / ("rows.txt" if kind == "lines" else f"rows.{kind}")
    with path.open("wb") as stream:
        stream.write(b"text\n" if kind == "csv" else b"")
        stream.writelines(row % i for i in range(100_000))
    documents = read_documents(Source(path=str(path), documents="lines"))
    next(documents)
    tracemalloc.start()
    try:
        assert sum(1 for _ in documents) == 99_999
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # a chunk split into lines, and never the file
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_column_names_where_each_row_comes_from(tmp_path, kind):
    rows = [{"text": "one", "from": "web"}, {"text": "two", "from": "books"}, {"text": "three", "from": ""}]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        path.write_text("text,other,from\none,x,web\ntwo,x,books\nthree,x,\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = Source(path=str(path))
    documents = [(document.text, document.source) for document in read_documents(source, source_column="from")]
    assert documents == [("one", "web"), ("two", "books"), ("three", source.label)]
    with pytest.raises(DataError, match=r"no column 'origin'.*Set source_column"):
        list(read_documents(source, source_column="origin"))


def test_a_source_may_be_called_by_a_number_and_one_of_them_is_0(tmp_path: Path):
    path = written(tmp_path / "rows.jsonl", b'{"text": "one", "from": 0}\n{"text": "two", "from": 1}\n')
    assert [d.source for d in read_documents(Source(path=str(path)), source_column="from")] == ["0", "1"]


def test_an_array_of_rows_behind_a_byte_order_mark(tmp_path: Path):
    path = written(tmp_path / "rows.json", b'\xef\xbb\xbf[\r\n  {"text": "one"},\r\n  {"text": "two"}\r\n]')
    assert texts(path) == ["one", "two"]
