"""Renders a trace as one HTML file that needs nothing else: `page/` is the template, the trace its data."""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable
from importlib import resources

from tercet.explorer.packing import PackedArray
from tercet.explorer.page_data import PRECISIONS, Precision, arrays, facts, least_bytes
from tercet.explorer.record import Trace
from tercet.explorer.words import LANGUAGES, BilingualError, strings

BYTES_OF_SMALL = 4_900_000  # that a page of 12 layers and 64 tokens may have
MOST_BYTES = 3 * BYTES_OF_SMALL

STYLES = ("style.css", "frame.css", "figures.css", "parts.css")
SCRIPTS = (
    "inflate.js",
    "arrays.js",
    "core.js",
    "strips.js",
    "tokens.js",
    "block.js",
    "block_parts.js",
    "attention.js",
    "timeline.js",
    "player.js",
    "mlp.js",
    "predictions.js",
    "weights.js",
    "main.js",
)


def render(trace: Trace, *, max_bytes: int | None = None, form_action: str | None = None) -> str:
    """One self-contained page: no network, no script but its own, every text of the model inserted as text.

    Args:
        max_bytes: Arrays are packed less precisely, then left out with a word in their place, until the page fits. What
            no precision can shrink (the text itself, the vocabulary) may still exceed it. None is 4.9 MB for 12 layers
            and 64 tokens, more in proportion for more of them, at most three times that.
        form_action: Where a box for another prompt sends it, by POST, as `prompt` and `new_tokens`; None for no box.

    Raises:
        BilingualError: If the model computed numbers that are not finite.
    """
    wrong = next((i for i, loss in enumerate(trace.losses) if not math.isfinite(loss)), None)
    if wrong is not None:
        raise BilingualError("model.diverged", token=wrong + 1, loss=trace.losses[wrong], model=trace.model.name)
    limit = _usual_limit(trace) if max_bytes is None else max_bytes
    for precision in PRECISIONS[:-1]:
        if least_bytes(trace, precision) > limit:
            continue
        packed = arrays(trace, precision)
        if sum(len(array.data) for array in packed.values()) > limit:
            continue
        page = _page(trace, precision, packed, form_action)
        if len(page.encode()) <= limit:
            return page
    return _page(trace, PRECISIONS[-1], arrays(trace, PRECISIONS[-1]), form_action)


def _usual_limit(trace: Trace) -> int:
    more = trace.model.num_layers / 12 * len(trace.tokens) / 64
    return int(min(BYTES_OF_SMALL * max(more, 1.0), MOST_BYTES))


def _page(trace: Trace, precision: Precision, packed: dict[str, PackedArray], form_action: str | None) -> str:
    data = facts(trace, precision)
    data["arrays"] = {name: {"kind": a.kind, "shape": a.shape, "bits": a.bits} for name, a in packed.items()}
    data["form_action"] = form_action
    style, dark = "\n".join(source(name) for name in STYLES), source("dark.css")
    script = "(() => {\n'use strict';\n" + "\n".join(source(name) for name in SCRIPTS) + "\n})();"
    parts = {
        "CSP": policy((style, dark), script, form_action),
        "TITLE": html.escape(_writable(f"{trace.model.name}: {trace.prompt[:60]}")),
        "STYLE": style,
        "DARK": dark,
        "SCRIPT": script,
        "STRINGS": embedded_json({language: strings("page", language) for language in LANGUAGES}),
        "FACTS": embedded_json(data),
        "ARRAYS": "\n".join(_array_element(name, array) for name, array in packed.items()),
    }
    # One pass: what is put in is not searched again, so a prompt that spells a placeholder stays a prompt.
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], source("page.html"))


def source(name: str) -> str:
    """A file of the page, as text."""
    return resources.files("tercet.explorer").joinpath("page", name).read_text(encoding="utf-8")


def _writable(text: str) -> str:
    """Lone surrogates, which no file can hold, as question marks."""
    return text.encode("utf-8", "replace").decode()


def embedded_json(value: object) -> str:
    """JSON for a script element: no `<`, so that nothing in it can end the element or begin a comment.

    Raises:
        ValueError: If a number is not finite; JSON has no word for it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate cannot be written as UTF-8, and JSON.parse takes its escape.
    text = re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _array_element(name: str, array: PackedArray) -> str:
    return f'<script type="application/octet-stream" id="array-{name}">{array.data}</script>'


def policy(styles: Iterable[str], script: str, form_action: str | None) -> str:
    """Content security: these styles, this script, nothing else; `data:` is the empty icon, which saves a request."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    form = "'none'" if form_action is None else "'self'"
    return "; ".join(
        [
            "default-src 'none'",
            "style-src " + " ".join(f"'sha256-{digest(style)}'" for style in styles),
            f"script-src 'sha256-{digest(script)}'",
            "img-src data:",
            "base-uri 'none'",
            f"form-action {form}",
        ]
    )
