"""The server's page that says why a text was not run, with the box again; in the reader's language, and in the other.

The language: of the page that sent the text; else, for a browser that comes without one, what it says it accepts. A
reader who chose one on any page of this server keeps it: the browser remembers, and the page's own script obeys.
"""

import html
import re

from tercet.explorer.render import STYLES, embedded_json, policy, source
from tercet.explorer.words import LANGUAGES, BilingualError, sentence, strings
from tercet.training.errors import UserError

_WORDS = ("title", "prompt", "new_tokens", "run", "running", "back", "other_language")


def language_of(chosen: str | None, accepted: str | None) -> str:
    """The language to begin with.

    Args:
        chosen: What the form says; None or anything else where none was chosen.
        accepted: The header Accept-Language, such as "de, zh-CN;q=0.8".
    """
    if chosen in LANGUAGES:
        return chosen
    wanted = []
    for place, part in enumerate((accepted or "").split(",")):
        tag, _, weight = part.strip().partition(";q=")
        try:
            wanted.append((-float(weight or 1), place, tag.partition("-")[0].lower()))
        except ValueError:  # not as the header is to be; another may be
            continue
    return next((tag for weight, _, tag in sorted(wanted) if tag in LANGUAGES and weight < 0), "en")


def told(error: Exception) -> BilingualError:
    """A failed run as something that every language has a sentence for; what no sentence is of stays as it is."""
    if isinstance(error, BilingualError):
        return error
    if isinstance(error, UserError):
        return BilingualError("run.english", error=error)
    return BilingualError("run.failed", error=f"{type(error).__name__}: {error}")


def problem_page(problem: BilingualError, prompt: str, new_tokens: int, language: str, action: str) -> str:
    """Says what is wrong, and has the box again with what was in it."""
    texts = {
        name: {word: strings("problems", name)[word] for word in _WORDS} | {"problem": problem.told_in(name)}
        for name in LANGUAGES
    }
    style, dark = "\n".join(source(name) for name in STYLES), source("dark.css")
    script = f"(() => {{\n'use strict';\n{source('problem.js')}\n}})();"
    here = {word: html.escape(text) for word, text in texts[language].items()}
    parts = {
        "LANG": "zh-CN" if language == "zh" else "en",
        "LANGUAGE": language,
        "TITLE": here["title"],
        "PROBLEM": here["problem"],
        "PROMPTLABEL": here["prompt"],
        "NEWTOKENSLABEL": here["new_tokens"],
        "RUN": here["run"],
        "BACK": here["back"],
        "PROMPT": html.escape(prompt),
        "NEWTOKENS": str(new_tokens),
        "ACTION": action,
        "CSP": html.escape(policy((style, dark), script, action)),
        "STYLE": style,
        "DARK": dark,
        "SCRIPT": script,
        "STRINGS": embedded_json(texts),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], source("problem.html"))


def in_all_languages(key: str, **values: object) -> str:
    """A line of plain text for each language: for answers that are no page."""
    return "".join(f"{sentence('problems', key, values, language)}\n" for language in LANGUAGES)
