"""A recipe that begins with a model of the Hub: by name and revision, with the weights' hash that the Hub shows."""

import json
import sys

import pytest
import yaml
from hub_server.clients import run_client


@pytest.mark.slow
def test_a_run_begins_with_a_revision_of_a_hub_model(hub, trained, tmp_path):
    model = hub.create("user/base")
    model.add_folder(trained)
    first = model.history()[0].oid
    model.add({"config.json": '{"model_type": "llama"}'})
    (tmp_path / "chats.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]})
            + "\n"
            for i in range(150)
        ),
        "utf-8",
    )
    command = [
        sys.executable, "-m", "tercet", "train", "sft", "--output", tmp_path / "run",
        "--set", "data.sources=[{path: chats.jsonl, messages_column: messages}]",
        "--set", "training.num_steps=2", "--set", "training.evaluate_every=2", "--set", "training.sequence_length=32",
        "--set", "samples.max_new_tokens=3",
    ]  # fmt: skip
    name = f"hf://user/base@{first}"
    done = run_client(hub, [*command, "--set", f"model.from_checkpoint={name}"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    recorded = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text("utf-8"))["model"]
    assert recorded["from_checkpoint"] == name
    assert recorded["weights_sha256"] == model.files()["model.safetensors"].sha256
    # The newest one is of another family; what is missing is said in one line.
    for wrong, says in (("user/base", "holds a llama model"), ("user/none", "cannot be had from the Hub")):
        refused = run_client(hub, [*command, "--set", f"model.from_checkpoint=hf://{wrong}"], folder=tmp_path)
        assert refused.returncode == 2 and says in refused.stderr
        assert refused.stderr.count("\n") == 1
