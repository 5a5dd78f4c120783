"""docs/data.md's road past one machine: datatrove drops near-duplicates, `tercet data prepare` takes what it wrote."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# An environment of its own, beside this one's packages: it wants an older xxhash than datasets does.
PYTHON = Path(sys.prefix) / "trove" / "bin" / "python"
CHAPTER = "## Near-duplicates and filters beyond one machine"


@pytest.fixture(scope="module")
def chapter(root) -> str:
    page = (root / "docs" / "data.md").read_text(encoding="utf-8")
    return page.partition(CHAPTER)[2].partition("\n## ")[0]


def block(chapter: str, language: str, containing: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", chapter, re.MULTILINE | re.DOTALL)
    (text,) = [text for text in found if containing in text]
    return text


def test_near_duplicates_are_dropped_and_the_rest_is_prepared(chapter, small_corpus, small_tokenizer, tmp_path):
    if not PYTHON.exists():
        pytest.skip("datatrove is not installed: make ecosystem")
    # Two thirds of "Execution model" are "Naming and binding".
    documents = [text for text in small_corpus if len(text.split()) > 200 and not text.startswith("Naming and binding")]
    copies = [text.replace(text.split()[100], "elsewhere", 1) for text in documents[:10]]
    assert len(documents) >= 40
    assert not set(copies) & set(documents)
    rows = [*documents, *copies, "too short"]
    (tmp_path / "raw").mkdir()
    for name, part in (("a", rows[::2]), ("b", rows[1::2])):
        lines = "".join(json.dumps({"text": text, "id": str(number)}) + "\n" for number, text in enumerate(part))
        (tmp_path / "raw" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    small_tokenizer.save_pretrained(tmp_path / "out" / "demo")
    (tmp_path / "clean.py").write_text(block(chapter, "python", "LocalPipelineExecutor"), encoding="utf-8")

    *_, clean, prepare = block(chapter, "bash", "clean.py").splitlines()
    run([str(PYTHON), *shlex.split(clean, comments=True)[1:]], tmp_path)
    run([sys.executable, "-m", *shlex.split(prepare), "--set", "tokenizer.path=out/demo"], tmp_path)

    written = b"".join(gzip.decompress(file.read_bytes()) for file in (tmp_path / "clean").iterdir())
    kept = [json.loads(line)["text"] for line in written.splitlines()]
    # Which one of two near-duplicates stays is datatrove's choice.
    originals = dict(zip(copies, documents, strict=False))
    assert sorted(originals.get(text, text) for text in kept) == sorted(documents)
    (source,) = json.loads((tmp_path / "out" / "clean" / "data" / "manifest.json").read_text())["by_source"].values()
    assert source["documents"] == len(documents)
    assert source["tokens"] == counted_tokens(tmp_path / "work" / "logs" / "3" / "stats.json") + len(documents)


def counted_tokens(stats: Path) -> int:
    """What datatrove counted with our `tokenizer.json`: no ends of text."""
    (counter,) = [step for step in json.loads(stats.read_text()) if "TOKENIZER" in step["name"]]
    return counter["stats"]["tokens"]["total"]


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
