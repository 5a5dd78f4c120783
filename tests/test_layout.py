"""The rules that keep the folders apart, read from the source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = [
    name
    for name in ("modeling", "tokenizer", "training", "hub", "interop", "explorer", "entry")
    if (ROOT / name / "__init__.py").is_file()
]
CODE_FOLDERS = [*PACKAGE_FOLDERS, "benchmarks", "tests"]
MAX_LINES = 420  # "about 400"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every import statement of a file, wherever it stands, with each module it names ("." stands for relative)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node, "." * node.level + (node.module or "")


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_no_module_is_imported_under_a_second_name():
    """From the root, `import modeling` works as well, and its classes are not those of `tercet.modeling`."""
    wrong = [
        f"{place(path, node)} imports {module}"
        for path in sources(*CODE_FOLDERS)
        for node, module in imports(path)
        if module.partition(".")[0] in PACKAGE_FOLDERS
    ]
    assert not wrong


@pytest.mark.parametrize("ground", ["modeling", "tokenizer"])
def test_ground_floor_imports_no_other_folder(ground):
    wrong = []
    for path in sources(ground):
        if path.name == "__main__.py":  # a door to the command, no part of the floor
            continue
        for node, module in imports(path):
            names = [module]
            if module == "tercet" and isinstance(node, ast.ImportFrom):
                names = [f"tercet.{alias.name}" for alias in node.names]
            wrong += [
                f"{place(path, node)} imports {name}"
                for name in names
                if name.partition(".")[0] == "tercet" and not f"{name}.".startswith(f"tercet.{ground}.")
            ]
    assert not wrong


def test_modeling_is_what_the_remote_code_copier_reads():
    """The copier sees `from .file import name` and nothing else of this folder; a foreign import needs installing."""
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    allowed |= {"huggingface_hub", "safetensors"}  # transformers cannot be without them
    wrong = []
    for path in sources("modeling"):
        if path.parent != ROOT / "modeling":
            wrong.append(f"{path.relative_to(ROOT)} is in a subfolder")
        if path.name == "__init__.py":  # not copied
            continue
        for node, module in imports(path):
            if module.startswith("."):
                if not re.fullmatch(r"\.[a-z]\w*", module):
                    wrong.append(f"{place(path, node)} imports {module}, which the copier misses")
                elif not (ROOT / "modeling" / f"{module[1:]}.py").is_file():
                    wrong.append(f"{place(path, node)} imports {module}, which is no file of modeling/")
            elif module.partition(".")[0] not in allowed:
                wrong.append(f"{place(path, node)} imports {module}")
    assert not wrong


def test_modeling_has_no_line_that_only_looks_like_an_import():
    """The copier reads lines: one inside a docstring counts as an import."""
    wrong = []
    for path in sources("modeling"):
        real = {node.lineno for node, _ in imports(path)}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"\s*(from\s+\S+\s+import|import\s+\S+\s*$)", line) and number not in real:
                wrong.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert not wrong


_LOADED_BY_HELP = """
import sys
sys.argv = ["tercet", "--help"]
from tercet.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
loaded = {name.partition(".")[0] for name in sys.modules}
print("HEAVY:", sorted(loaded & {"torch", "transformers", "datasets", "accelerate", "tokenizers", "matplotlib"}))
"""


def test_help_loads_nothing_heavy():
    shown = subprocess.run([sys.executable, "-c", _LOADED_BY_HELP], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "Usage" in shown.stdout
    assert shown.stdout.rstrip().endswith("HEAVY: []")


def test_files_can_be_read_in_one_sitting():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*CODE_FOLDERS)}
    assert not [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > MAX_LINES]
