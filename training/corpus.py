"""The default corpus: English prose about Python that every CPython carries, read without network or import.

Two parts: the language reference that `help()` shows (`pydoc_data.topics`), and the docstrings of the standard library,
parsed from its source with `ast`. A document is a module or a class: its own docstring, then those of its functions.
"""

import ast
import inspect
import os
import pydoc_data.topics
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tercet.training.documents import Document

PYTHON_DOCS = "python-docs"
PYTHON_DOCS_LICENSE = "psf-2.0"
PYTHON_DOCS_DESCRIPTION = (
    "Python's documentation topics (pydoc_data.topics) and the docstrings of its standard library, as the interpreter "
    "that ran the training carries them."
)

# Tests and bundled third parties are not documentation; encodings say one sentence a hundred times.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
    *("_bundled", "site-packages", "dist-packages"),
}
_MIN_DOCUMENT_CHARS = 200
_MIN_PROSE_FRACTION = 0.75

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_documentation() -> Iterator[Document]:
    """Yield the documents of the running Python's documentation, about 2 MB, in an order that never changes.

    No text occurs in two documents: a docstring that an earlier one repeats word for word is left out.
    """
    seen: set[str] = set()
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        text = _paragraphs(topic.strip(), keep_code=True)
        if text not in seen:
            seen.add(text)
            yield Document(text + "\n", PYTHON_DOCS)
    leftovers: list[str] = []
    for path in _standard_library():
        for text in _module_documents(path, seen):
            # A few words alone teach nothing about how a text goes on: they wait for company.
            if len(text) >= _MIN_DOCUMENT_CHARS:
                yield Document(text + "\n", PYTHON_DOCS)
                continue
            leftovers.append(text)
            if sum(map(len, leftovers)) >= 4 * _MIN_DOCUMENT_CHARS:
                yield Document("\n\n".join(leftovers) + "\n", PYTHON_DOCS)
                leftovers.clear()
    if leftovers:
        yield Document("\n\n".join(leftovers) + "\n", PYTHON_DOCS)


def _standard_library() -> Iterator[Path]:
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _module_documents(path: Path, seen: set[str]) -> Iterator[str]:
    """The module's text, then one for each of its classes, at any depth of nesting; empty ones left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in someone else's source are not our user's concern
            module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # a file kept for its errors, or one that this user may not read, documents nothing
    owners: list[ast.AST] = [module]
    for owner in owners:
        texts: list[str] = []
        inner = [owner]
        for node in inner:
            texts.append(_docstring(node, seen))
            for child in ast.iter_child_nodes(node):
                # Classes become documents of their own; functions, also those under `if`, belong to their owner.
                (owners if isinstance(child, ast.ClassDef) else inner).append(child)
        if text := "\n\n".join(filter(None, texts)):
            yield text


def _docstring(node: ast.AST, seen: set[str]) -> str:
    if not isinstance(node, _DOCUMENTED):
        return ""
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return ""
    text = _paragraphs(inspect.cleandoc(text), keep_code=False)
    if text in seen:
        return ""
    seen.add(text)
    return text


def _paragraphs(text: str, *, keep_code: bool) -> str:
    """Join the paragraphs by one blank line; without keep_code, only those that read as prose."""
    paragraphs = "\n".join(line.rstrip() for line in text.splitlines()).split("\n\n")
    return "\n\n".join(p.strip("\n") for p in paragraphs if p.strip() and (keep_code or _is_prose(p)))


def _is_prose(paragraph: str) -> bool:
    """Words, not doctests, tables or rules: the line between the two was drawn by reading what falls on each side."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return ">>>" not in paragraph and letters + paragraph.count("\n") >= _MIN_PROSE_FRACTION * len(paragraph)
