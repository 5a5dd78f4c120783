"""Prepared data that is taken without reading its text again, where nobody has touched the files since.

A file counts as untouched if its size, its times of writing and of change, and its number on the disk are what they
were before it was read. The time of change (ctime) is set by the kernel at every write and by no program, so neither
`cp -p` nor `touch` hides one. Whatever is in doubt is read: datasets of the Hub, Python's own documentation, files that
were written to shortly before, other settings, another version of Tercet.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

import tercet
from tercet.training.atomic import write_atomically
from tercet.training.corpus import PYTHON_DOCS
from tercet.training.documents import DataError
from tercet.training.recipe import Recipe
from tercet.training.shard_files import explained, hash_text
from tercet.training.shards import tokenizer_hash
from tercet.training.source import Source, local_paths
from tercet.training.token_set import PreparedData

FILES_NAME = "files.json"

# Of a source, what decides no document.
_NO_READING_FACTS = ("weight", "license", "description", "streaming")

# A second write within one tick of a file system's clock leaves the times as they are; FAT has the longest, 2 s.
_SETTLED_AFTER_NS = 3 * 10**9


@dataclass(frozen=True)
class SourceFiles:
    """What a preparation is asked for and the state of the files that it reads.

    Attributes:
        asked: Stands for all that decides, besides the files, what is prepared.
        files: Stands for the names and states of the files; None where another write from now on might not show.
    """

    asked: str
    files: str | None

    @classmethod
    def look(
        cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, part: tuple[int, int] | None
    ) -> "SourceFiles | None":
        """How the files are now; None where a source is something else than files, or one of them cannot be opened.

        That is no error here: a set that was merged from parts may be all that this machine has of its text.
        """
        now = time.time_ns()
        files, newest = hashlib.blake2b(digest_size=16), 0
        try:
            for source in recipe.data.all_sources():
                paths = [] if source.path == PYTHON_DOCS else local_paths(source.path)
                if not paths:
                    return None
                for path in paths:
                    state = _state(path)
                    newest = max(newest, state.st_mtime_ns, state.st_ctime_ns)
                    facts = (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
                    files.update(f"{path.absolute()}\0{facts}\0".encode("utf-8", "surrogateescape"))
        except (OSError, DataError):
            return None
        asked = hash_text(json.dumps(_asked(recipe, tokenizer, part), sort_keys=True))
        return cls(asked, files.hexdigest() if newest + _SETTLED_AFTER_NS < now else None)

    def prepared(self, data_dir: Path) -> PreparedData | None:
        """The set that was made of these files, in this state; None if it is not known to be."""
        try:
            record = json.loads((data_dir / FILES_NAME).read_text("utf-8"))
            data = PreparedData.open(data_dir)
        except (OSError, ValueError, DataError):
            return None
        return data if self.files is not None and record == self._record(data) else None

    def remember(self, data_dir: Path, data: PreparedData) -> None:
        """Note that the set was made of these files.

        Raises:
            DataError: The disk is full.
        """
        with explained(data_dir / FILES_NAME):
            write_atomically(data_dir / FILES_NAME, (json.dumps(self._record(data), indent=2) + "\n").encode())

    def _record(self, data: PreparedData) -> dict[str, Any]:
        return {"asked": self.asked, "files": self.files, "prepared": data.fingerprint}


def reading_facts(source: Source) -> dict[str, Any]:
    """Of a source's settings, those that decide its documents; for JSON."""
    return source.model_dump(mode="json", exclude=set(_NO_READING_FACTS))


def _asked(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, part: tuple[int, int] | None) -> dict[str, Any]:
    data = recipe.data
    return {
        "version": tercet.__version__,
        "sources": [reading_facts(source) for source in data.all_sources()],
        "validation_fraction": data.validation_fraction,
        "split_by": data.split_by,
        "drop_duplicates": data.drop_duplicates,
        "tokenizer": tokenizer_hash(tokenizer),
        "chat_template": tokenizer.chat_template,
        "eos_token_id": tokenizer.eos_token_id,
        "part": part,
    }


def _state(path: Path) -> os.stat_result:
    """A file's state. Opened, as a file server is asked anew then, and not when a name is looked up."""
    with path.open("rb") as file:
        return os.fstat(file.fileno())
