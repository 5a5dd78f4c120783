"""Writes the folder that transformers loads, and proves that it does, in a process that has no Tercet."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tercet.training.atomic import make_readable, place_files, temporary_folder
from tercet.training.errors import UserError


def write_model_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Weights, config, code, tokenizer and generation settings, as `from_pretrained` wants them.

    Args:
        model: Unwrapped.
        folder: Made if missing; files of the same names are replaced.
        weights: Written instead of the model's own, named as its `state_dict` names them: a copy that does not change
            while it is written, or whole tensors where the model's are spread over processes.
    """
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        # Several, where turns end otherwise than texts.
        eos_token_id=ends if isinstance(ends, list) else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # save_pretrained takes names out of the mapping that it is given.
    model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    tokenizer.save_pretrained(folder)


def replace_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """As `write_model_folder`, but each file appears whole, and weights before the config that names them."""
    with temporary_folder(folder) as temporary:
        write_model_folder(model, tokenizer, Path(temporary))
        make_readable(Path(temporary))
        place_files(Path(temporary), folder, last="config.json")


@dataclass(frozen=True)
class LoadCheck:
    """What a process without Tercet made of a folder.

    Attributes:
        model_class: The class that it loaded.
        greedy: Continuation of the prompt, the likeliest token each time.
        sampled: Another, sampled.
    """

    model_class: str
    greedy: str
    sampled: str


# Run with this file's interpreter and libraries; `tercet` is made unimportable, as on a reader's machine.
_SCRIPT = """
import json, sys

class NoTercet:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tercet":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, NoTercet())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, max_new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(prompt, return_tensors="pt")
num_prompt_tokens = inputs["input_ids"].shape[1]

def continuation(**settings):
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, **settings)
    return tokenizer.decode(output[0, num_prompt_tokens:], skip_special_tokens=True)

torch.manual_seed(0)
print(json.dumps({
    "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
    "greedy": continuation(do_sample=False),
    "sampled": continuation(do_sample=True, temperature=0.7, top_p=0.95),
}))
"""


def check_loads_without_tercet(folder: Path, prompt: str, *, max_new_tokens: int = 40) -> LoadCheck:
    """Load a folder through the Auto classes and generate, in a new process that cannot import Tercet.

    Raises:
        UserError: It did not load or generate; the message has the reason.
    """
    with tempfile.TemporaryDirectory() as modules:
        # Remote code is copied into a module cache before it is imported; a fresh one, so that nothing old answers.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(folder.resolve()), prompt, str(max_new_tokens)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            cwd=modules,
            check=False,
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{folder} does not load in a process without Tercet: {reason}")
    return LoadCheck(**json.loads(done.stdout.strip().splitlines()[-1]))
