"""A run's folder as `tercet train` leaves it, without the training: what is pushed in tests."""

import json
from pathlib import Path
from typing import Any

RECIPE = """\
output_dir: out/verse
data: {path: poems}
training: {num_steps: 640}
card: {license: apache-2.0, language: [en]}
"""
RESULTS: dict[str, Any] = {
    "tercet_version": "0.1.0",
    "date": "2026-01-02T03:04:05+00:00",
    "versions": dict.fromkeys(("python", "torch", "transformers", "tokenizers", "datasets", "accelerate"), "1.2.3"),
    "hardware": {"device": "cpu", "processor": "A CPU", "num_processes": 1, "num_threads": 2},
    "data": {
        "sources": [{"name": "poems", "documents": 11, "bytes": 5000, "license": "cc0-1.0"}],
        "language": ["en"],
        "train": {"documents": 9, "tokens": 2500, "bytes": 4000},
        "validation": {"documents": 2, "tokens": 300, "bytes": 1000},
    },
    "tokenizer": {"vocab_size": 1024, "bytes_per_token": 3.2},
    "model": {"num_parameters": 20000, "num_non_embedding_parameters": 4000},
    "training": {
        "num_steps": 640,
        "tokens_seen": 5000,
        "epochs": 2.0,
        "duration_s": 75.2,
        "tokens_per_second": 66.5,
        "optimizer": "Muon",
        "schedule": "cosine",
        "precision": "float32",
        "final_loss_nats": 2.25,
    },
    "evaluation": {"loss_nats": 2.5, "perplexity": 12.18, "bits_per_byte": 1.127, "num_tokens": 300, "num_bytes": 1000},
    "samples": [{"prompt": "The", "text": " moon", "settings": "greedy"}],
}
# What the run keeps for itself, in its folder and beside it.
PRIVATE = (
    ".tercet-run",
    ".tercet-lock",
    "optimizer-0.safetensors",
    "notes.txt",
    "data/manifest.json",
    "state/rng-0.safetensors",
    "checkpoints/step-00000600/config.json",
    "trackers/events",
)


def write_checkpoint(folder: Path, tokenizer: Any, *, preset: str = "classic") -> Path:
    """Write such a folder.

    Args:
        preset: `llama` makes a model that Llama can express; `classic` is smaller still.
    """
    import torch

    from tercet.modeling import TercetConfig, TercetForCausalLM
    from tercet.tokenizer import token_ids
    from tercet.training.export import write_model_folder

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": len(tokenizer),
        **token_ids(tokenizer)._asdict(),
    }
    config = TercetConfig.modern(**sizes, qk_norm=False) if preset == "llama" else TercetConfig.classic(**sizes)
    write_model_folder(TercetForCausalLM(config), tokenizer, folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "README.md").write_text("what an earlier card said\n")
    records = [{"step": step, "tokens": 8 * step, "loss_nats": 6 - step / 200} for step in range(20, 641, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "loss.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    for name in PRIVATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0")
    return folder
