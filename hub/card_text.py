"""Texts that others wrote, made safe for the place in a card where they will stand."""

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


def strings(value: Any) -> set[str]:
    """All texts inside of lists and mappings, keys too: sources are told apart by their paths."""
    if isinstance(value, str):
        return {value}
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*(strings(item) for item in inside))


def public(text: str) -> str:
    """The last part of an absolute path; any other text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if (kind(text).is_absolute() or text.startswith("~/")) and kind(text).name:
            return kind(text).name
    return text


def shortened_yaml(text: str, shorten: Callable[[str], str]) -> str:
    """YAML with its texts shortened, keys too, layout and comments kept; made anew where that cannot be.

    Args:
        shorten: Gives a text's short form, or the text itself.

    Raises:
        yaml.YAMLError: The text is no YAML.
    """
    import yaml

    value = yaml.safe_load(text)
    expected, short = _mapped(value, shorten), text
    for whole in sorted(strings(value), key=len, reverse=True):
        kept = shorten(whole)
        if kept != whole:
            pattern = rf"(?<![\w./~-])(['\"]?){re.escape(whole)}\1(?![\w./-])"
            short = re.sub(pattern, lambda match, kept=kept: _scalar(kept, match[1]), short)
    try:
        if yaml.safe_load(short) == expected:
            return short
    except yaml.YAMLError:
        pass
    return yaml.safe_dump(expected, sort_keys=False, allow_unicode=True, width=120)


def _scalar(text: str, quote: str) -> str:
    """A text as YAML writes it, quoted as it was, or if it means something else without: `*`, `2024`, `no`."""
    import yaml

    try:
        is_plain = yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        is_plain = False
    return f"{quote}{text}{quote}" if quote or is_plain else json.dumps(text, ensure_ascii=False)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def fence(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks inside, so that nothing can close it early."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


def cell(text: str) -> str:
    """One line that stays in its table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def duration(seconds: float) -> str:
    """As people say it, to the tenth of a second, the second or the minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
