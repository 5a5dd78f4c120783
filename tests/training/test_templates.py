import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.training.skips import RowError
from tercet.training.templates import TextTemplate


def filled(template: str, **row: object) -> str:
    return TextTemplate.parse(template).fill(row)


def test_columns_are_put_in_and_braces_written_twice_are_braces():
    assert filled("# {title}\n\n{body}", title="T", body="B") == "# T\n\nB"
    assert filled("{a}{a} {{x}} {b}", a="1", b="2") == "11 {x} 2"
    assert filled("{my column}{a.b}{c[0]}", **{"my column": "x", "a.b": "y", "c[0]": "z"}) == "xyz"


def test_numbers_and_truth_values_are_written_as_json_does():
    assert filled("{a} {b} {c}", a=7, b=0.5, c=True) == "7 0.5 true"


def test_a_null_is_empty_and_a_row_of_nulls_is_no_document():
    assert filled("# {title}\n\n{body}", title=None, body="B") == "# \n\nB"
    assert filled("# {title}\n\n{body}", title=None, body="") == ""
    assert filled("{n}", n=0) == "0"


def test_what_a_column_holds_is_never_read_as_a_template():
    assert filled("{a}{b}", a="{b}", b="{a.__class__}") == "{b}{a.__class__}"


@given(before=st.text(max_size=5), value=st.text(min_size=1, max_size=5), after=st.text(max_size=5))
def test_any_literal_text_comes_through(before: str, value: str, after: str):
    def doubled(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    assert filled(doubled(before) + "{a}" + doubled(after), a=value) == before + value + after


def test_no_attribute_of_a_value_is_reached():
    with pytest.raises(RowError, match=r"has no column 'a\.__class__'; it has 'a'"):
        filled("{a.__class__}", a="x")


@pytest.mark.parametrize("value", [["x"], {"x": 1}, b"x"])
def test_other_types_are_refused(value: object):
    with pytest.raises(RowError, match=rf"holds a {type(value).__name__} in column 'a'.*Leave that column out"):
        filled("{a}", a=value)


def test_an_unknown_column_names_those_that_exist():
    with pytest.raises(RowError, match=r"has no column 'titel'; it has 'title', 'body'\. Set text_template"):
        filled("{titel}", title="x", body="y")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{", "expected '}'|single '{'"),
        ("a } {b}", "single '}'"),
        ("{}", "empty braces name no column"),
        ("{a:>10}", "has a format"),
        ("{a!r}", "has a format"),
        ("no column", "names no column"),
        ("", "names no column"),
    ],
)
def test_a_template_that_cannot_be_read(template: str, message: str):
    with pytest.raises(ValueError, match=message):
        TextTemplate.parse(template)
