"""What cannot be used is an error that says how many, or is skipped and counted with its place; never silent."""

import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.training.sources import DataError, SkipReport, Source, read_documents

LINES = {
    b'{"text": "good 1"}': None,
    b'{"text": "torn': "not_json",
    b'{"body": "a"}': "missing_column",
    b'{"text": "good 2", "n": [1]}': None,
    b'{"text": 7}': "wrong_type",
    b'["text"]': "wrong_type",
    b'{"text": "caf\xe9"}': "not_utf8",
    b'{"text": "a\0b"}': "nul",
    b'{"text": "a\\u0000b"}': "nul",
    b'{"text": "a\\udc00"}': "surrogate",
    b'{"text": "\xed\xa0\x80"}': "not_utf8",
    b'{"text": null}': "empty",
    b'{"text": ""}': "empty",
    b'{"text": "good \\ud83d\\ude42"}': None,
}


def read(path: Path, **settings: object) -> tuple[list[str], SkipReport]:
    skips = SkipReport()
    source = Source.model_validate({"path": str(path), "on_bad_row": "skip", **settings})
    return [document.text for document in read_documents(source, skips=skips)], skips


def reasons(skips: SkipReport, path: Path) -> dict[str, int]:
    return {reason: entry["count"] for reason, entry in skips.as_dict().get(str(path), {}).items()}


def test_every_kind_of_bad_line_is_counted_with_its_place_and_the_good_ones_are_kept(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(LINES))
    found, skips = read(path)
    assert found == ["good 1", "good 2", "good 🙂"]
    expected = [reason for reason in LINES.values() if reason]
    assert reasons(skips, path) == {reason: expected.count(reason) for reason in expected}
    assert skips.count() == len(LINES) - len(found)
    shown = "\n".join(skips.lines())
    assert f"{path}: 2 left out, with a NUL character" in shown
    assert f"    {path}, line 2 is not JSON: Unterminated string starting at" in shown
    assert f"    {path}, line 3 has no column 'text'; it has 'body'" in shown


@pytest.mark.parametrize("line", [line for line, reason in LINES.items() if reason not in (None, "empty")])
def test_the_error_says_how_many_rows_are_bad(tmp_path: Path, line: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "a"}', line, b'{"text": null}', b'{"text": "b"}', line, b'{"text": "c"}']))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2 .* Of 6 lines, 2 cannot be used; on_bad_row: skip") as e:
        list(read_documents(Source(path=str(path))))
    assert "\n" not in str(e.value)


@settings(max_examples=80, deadline=None)
@given(chosen=st.lists(st.sampled_from(list(LINES)), min_size=1, max_size=25))
def test_documents_and_skips_add_up_to_the_rows(tmp_path_factory, chosen: list[bytes]):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"\n".join(chosen) + b"\n")
    good = sum(LINES[line] is None for line in chosen)
    skips = SkipReport()
    documents = read_documents(Source(path=str(path), on_bad_row="skip"), skips=skips)
    if good:
        assert len(list(documents)) == good
    else:
        with pytest.raises(DataError, match=r"holds no document that can be used|is empty"):
            list(documents)
    assert skips.count() == len(chosen) - good
    for reason in {reason for line in chosen if (reason := LINES[line])}:
        assert skips.count(reason=reason) == sum(LINES[line] == reason for line in chosen)


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)])
def test_of_a_file_cut_short_the_whole_lines_before_the_break_are_kept(tmp_path: Path, suffix: str, compress):
    rows = [json.dumps({"text": f"{i} {hash(i * 7919) % 10**9:x}"}) for i in range(60_000)]
    whole = compress("\n".join(rows).encode())
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    found, skips = read(path)
    told = (
        rf"line {len(found) + 1} cannot be read, as the \{suffix} file is .* skip keeps the {len(found):,} lines before"
    )
    with pytest.raises(DataError, match=told):
        list(read_documents(Source(path=str(path))))
    assert found == [json.loads(row)["text"] for row in rows[: len(found)]]
    assert 0.3 * len(rows) < len(found) < 0.7 * len(rows)
    assert reasons(skips, path) == {"broken_file": 1}
    assert f"{path}, line {len(found) + 1} cannot be read" in skips.lines()[1]


def test_one_bad_file_among_many(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"\0\1")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"half of a document")[:20])
    (tmp_path / "f.jsonl").write_bytes(b"")
    (tmp_path / "g.csv").write_bytes(b'text,n\n"x"y,1\nz,2\ncaf\xe9,3\nw,caf\xe9\na,b,c\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", "y"]}), tmp_path / "h.parquet")
    (tmp_path / "i.parquet").write_bytes(b"PAR1")
    found, skips = read(tmp_path)
    assert found == ["good", "z", "w"]
    assert reasons(skips, tmp_path) == {
        "not_utf8": 2, "empty": 2, "nul": 1, "broken_file": 2, "malformed": 2, "missing_column": 2
    }  # fmt: skip
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8 \(byte 0xe9 at byte 3\).*on_bad_row: skip"):
        list(read_documents(Source(path=str(tmp_path))))


def test_invalid_utf8_inside_parquet_is_that_row_alone(tmp_path: Path):
    column = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found, skips = read(tmp_path / "a.parquet")
    assert found == ["a", "c"]
    assert "row 2 is not UTF-8" in skips.lines()[1]


def test_limits_of_length_count_what_they_leave_out(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a\nbb\nccc\n🙂🙂🙂🙂\neeeee\n", encoding="utf-8")
    found, skips = read(path, documents="lines", min_chars=2, max_chars=4, on_bad_row="error")
    assert found == ["bb", "ccc", "🙂🙂🙂🙂"]
    assert reasons(skips, path) == {"too_short": 1, "too_long": 1}


def test_where_nothing_is_left_the_error_says_why(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "x"}\n{"body": "y"}\n{"text": ""}\n')
    with pytest.raises(
        DataError, match=r"no document that can be used: 1 empty, 2 without the column \(first: .*line 1 h"
    ):
        read(path)


def test_a_broken_row_beyond_the_first_ones_costs_no_example(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"x\n" * 1000)
    _, skips = read(path)
    entry = skips.as_dict()[str(path)]["not_json"]
    assert entry["count"] == 1000
    assert [place.split(" is ")[0] for place in entry["examples"]] == [f"{path}, line {i}" for i in (2, 3, 4)]


def test_reports_add_up_and_survive_json():
    first, second = SkipReport(), SkipReport()
    for i in range(2):
        first.add("a", "not_json", f"first {i}")
        second.add("a", "not_json", f"second {i}")
    second.add("b", "empty", "somewhere")
    first.update(second)
    again = SkipReport.from_dict(json.loads(json.dumps(first.as_dict())))
    assert again.as_dict() == first.as_dict()
    assert first.as_dict()["a"]["not_json"] == {"count": 4, "examples": ["first 0", "first 1", "second 0"]}
    assert (first.count(), first.count("a"), first.count(reason="empty")) == (5, 4, 1)
    assert again.summary("a") == "4 not JSON"
    assert again.summary("c") == ""


def test_rows_whose_source_has_no_name_count_as_bad(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    names = (["x"], "x", ["y"])
    path.write_text("".join(json.dumps({"text": f"text {i}", "from": name}) + "\n" for i, name in enumerate(names)))
    with pytest.raises(DataError, match=r"line 1 holds a list in column 'from'.*Of 3 lines, 2 cannot be used"):
        list(read_documents(Source(path=str(path)), source_column="from"))
