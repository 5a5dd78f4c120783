"""`tercet chat` with a model that was tuned on conversations: its answers are those that any client gets."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.chat_turns import turn_end_id
from tercet.training.pipeline import train
from tercet.training.recipe import load_recipe

ANSWERS = {
    "Who wrote Faust?": "Goethe.", "What is snow like?": "White.", "Two and two?": "Four.", "Who are you?": "A model.",
    "Say é.": "é", "And in Greek?": "ξέρω", "Good night": "Sleep well.", "Where is Rome?": "In Italy.",
}  # fmt: skip


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory) -> Path:
    """The sft recipe from a small model, on a few answers until it knows them."""
    folder = tmp_path_factory.mktemp("tuned")
    rows = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in ANSWERS.items()
    ]
    rows += [[*first, *second] for first in rows for second in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), "utf-8")
    torch.manual_seed(0)
    model = TercetForCausalLM(
        TercetConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=1,
                     bos_token_id=0, eos_token_id=0, max_position_embeddings=128)
    )  # fmt: skip
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / "base")
    model.save_pretrained(folder / "base")
    recipe = load_recipe("sft", [
        f"model.from_checkpoint={folder / 'base'}", "training.num_steps=150", "training.evaluate_every=150",
        "training.save_every=150", f"data.sources=[{{path: {folder / 'chats.jsonl'}, messages_column: messages}}]",
        "samples.prompts=[]", "training.global_batch_size=8", "training.per_device_batch_size=8",
    ])  # fmt: skip
    train(recipe, output_dir=folder / "sft", say=lambda line: None)
    return folder / "sft"


def pipe(monkeypatch, *lines: str) -> None:
    """Let the command read these lines from a pipe."""
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


_CLIENT = """
import json, sys
sys.modules["tercet"] = None  # a reader's machine has none
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, *questions = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
messages = []
for question in questions:
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=50, do_sample=False)[0, inputs["input_ids"].shape[1]:]
    messages.append({"role": "assistant", "content": tokenizer.decode(output, skip_special_tokens=True)})
print(json.dumps([message["content"] for message in messages[1::2]]))
"""


def test_the_answers_are_those_of_a_client_without_tercet(tercet, tuned, monkeypatch, tmp_path):
    questions = ["Who wrote Faust?", "Two and two?", "And in Greek?"]
    pipe(monkeypatch, *questions, "/quit")
    shown = tercet("chat", tuned, "--temperature", 0, "--max-new-tokens", 50)
    assert shown.code == 0, shown.err
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT, str(tuned), *questions], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shown.out.splitlines() == json.loads(done.stdout)
    assert shown.out.splitlines() == [ANSWERS[question] for question in questions]


def test_a_script_pipes_its_lines_in(tercet, tuned, monkeypatch):
    """No prompt among the answers, blank lines say nothing, and the end of the input ends the chat."""
    pipe(monkeypatch, "Who wrote Faust?", "", "   ", "/reset", "/colour", "Two and two?")
    shown = tercet("chat", tuned, "--temperature", 0)
    assert shown.code == 0, shown.err
    assert shown.out == "Goethe.\nFour.\n"
    assert "there is no /colour" in shown.err


def test_without_a_chat_template_one_line_says_so(tercet, tuned, tmp_path):
    folder = shutil.copytree(tuned, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "*.jinja"))
    shown = tercet("chat", folder)
    assert shown.code == 2
    assert shown.err == f"tercet: {folder} has no chat template: use `tercet generate` to continue a text\n"


def test_history_is_what_the_next_turn_reads(tercet, tuned, monkeypatch, fed):
    pipe(monkeypatch, "Who wrote Faust?", "Two and two?")
    assert tercet("chat", tuned, "--temperature", 0, "--system", "Be brief.").code == 0
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    whole = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who wrote Faust?"},
            {"role": "assistant", "content": "Goethe."},
            {"role": "user", "content": "Two and two?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    read = [id for call in fed for id in call]
    # Everything once, the first answer as it was made; the second one follows.
    assert read[: len(whole)] == whole
    assert len(fed) < len(whole)


def test_turns_end_where_the_template_ends_them(tuned):
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    assert turn_end_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    assert turn_end_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert turn_end_id(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    assert turn_end_id(tokenizer) is None


def test_ctrl_c_stops_an_answer_and_not_the_chat(checkpoint, tmp_path):
    """A real process, real signals: the answer ends, the next message is answered, and /quit leaves."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(tmp_path)
    model = TercetForCausalLM(
        TercetConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                     max_position_embeddings=1_000_000, tie_word_embeddings=False)
    )  # fmt: skip
    one, other = tokenizer.convert_tokens_to_ids(["a", "b"])
    with torch.no_grad():  # of two opposite rows one is the likeliest token: no end, and no end of a line
        row = model.lm_head.weight[one].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[one], model.lm_head.weight[other] = row, -row
    model.save_pretrained(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet", "chat", str(tmp_path), "--temperature", "0", "--max-new-tokens", "900000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    answers = []
    try:
        for message in ("hello", "again"):
            process.stdin.write(message + "\n")
            process.stdin.flush()
            begun = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            answers.append(begun + process.stdout.readline())
        out, err = process.communicate("/quit\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert all(answer.strip("ab") == "\n" and 1 < len(answer) < 900_000 for answer in answers), answers
    assert out == ""
    assert "Traceback" not in err and "Aborted" not in err
