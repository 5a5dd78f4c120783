"""Sentences in the languages of the page, by their keys: `page/<kind>.<language>.json` has them.

What is recorded or goes wrong is told as a key and values, so that each reader has it in a language of theirs.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources

from tercet.training.errors import UserError

LANGUAGES = ("en", "zh")


def strings(kind: str, language: str) -> Mapping[str, str]:
    """All sentences of a kind: "page" or "problems"."""
    return _read(f"{language}.json" if kind == "page" else f"{kind}.{language}.json")


@functools.cache
def _read(name: str) -> Mapping[str, str]:
    return json.loads(resources.files("tercet.explorer").joinpath("page", name).read_text(encoding="utf-8"))


def sentence(kind: str, key: str, values: Mapping[str, object], language: str = "en") -> str:
    """One sentence with its values; what is put in is never searched for places again."""
    return strings(kind, language)[key].format_map({name: str(value) for name, value in values.items()})


class BilingualError(UserError):
    """A mistake of the user that can be told in every language of the page; as a string in English.

    Args:
        key: Of a sentence in `page/problems.*.json`.
        values: What is put into it.
    """

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(sentence("problems", key, values))
        self.key = key
        self.values = values

    def told_in(self, language: str) -> str:
        """The sentence in one of LANGUAGES."""
        return sentence("problems", self.key, self.values, language)
