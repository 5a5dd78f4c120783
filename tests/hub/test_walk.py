"""The README's walk from `pip install` to a model that was pushed, downloaded and talked to, word for word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Training is cut down to seconds; nothing else is changed but the name of the Hub's user.
SHORTER = {
    "tercet demo": " --steps 20",
    "tercet train sft": " --set training.num_steps=20 --set training.global_batch_size=4"
    " --set training.per_device_batch_size=4 --set training.evaluate_every=20",
}


@pytest.fixture(scope="module")
def walk(root) -> tuple[list[str], str]:
    """The commands, and the Python that follows them."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    blocks = [text for text in re.findall(r"^```(?:bash|python)\n(.*?)^```$", readme, re.M | re.S) if "YOU/" in text]
    commands, code = blocks
    return [re.sub(r"\s+#.*", "", line) for line in commands.splitlines()], code


def test_a_newcomers_walk(walk, hub, wheel_environment, tmp_path):
    pytest.importorskip("chatterbot_corpus", reason="the walk's dialogues come with the package chatterbot-corpus")
    commands, code = walk
    # Tercet's command is the new environment's; `hf` came with the libraries, which are this one's.
    folders = (wheel_environment / "bin", Path(sys.executable).parent, os.environ["PATH"])
    place = {**hub.environment(), "PATH": ":".join(map(str, folders))}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    printed = {}
    for command in commands:
        if command.startswith("pip install"):
            continue  # the first is what `wheel_environment` did, the second is here
        for words, shorter in SHORTER.items():
            command = command + shorter if command == words else command
        printed[command] = run("bash", "-ec", command.replace("YOU/", f"{hub.user}/"))
    answers = [text for command, text in printed.items() if "tercet chat" in command]
    assert len(answers) == 2 and answers[0] == answers[1], "the one that was downloaded is the one that was trained"
    assert answers[0].strip()

    repository = hub.repository(f"{hub.user}/tercet-chat")
    assert {"README.md", "config.json", "model.safetensors", "modeling_tercet.py", "tokenizer.json"} <= set(
        repository.files()
    )
    # Whoever reads the page may not have Tercet. What its code prints is drawn, and a model of a few steps may draw an
    # end at once: the same call is compared where nothing is drawn.
    alone = "import sys; sys.modules['tercet'] = None\n"
    *before, call = code.replace("YOU/", f"{hub.user}/").splitlines()
    drawn, greedy = call, re.sub(r"\}\]\)", "}], do_sample=False, max_new_tokens=200)", call)
    assert greedy != drawn
    python = str(wheel_environment / "bin" / "python")
    printed = run(python, "-c", alone + "\n".join([*before, drawn, "print('== greedy')", greedy]))
    assert printed.partition("== greedy\n")[2].strip() == answers[0].strip()


def test_what_is_cut_down_is_there(walk):
    commands, _ = walk
    assert set(SHORTER) <= set(commands)
