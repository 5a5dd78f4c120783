"""torchao: int8 weights when loading; logits, greedy tokens, bytes; saved and loaded again.

Argument: JSON with `folder`, `output`, `prompts`, `texts`, `max_new_tokens`.
"""

import json
import sys

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
rows = [torch.tensor([ids]) for ids in tokenizer(settings["texts"])["input_ids"]]
prompts = [torch.tensor([ids]) for ids in tokenizer(settings["prompts"])["input_ids"]]


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@torch.no_grad()
def measure(model):
    tokens = [
        model.generate(ids, max_new_tokens=settings["max_new_tokens"], do_sample=False)[0, ids.shape[1] :].tolist()
        for ids in prompts
    ]
    return {
        "tokens": tokens,
        "losses": [float(model(row, labels=row).loss) for row in rows],
        "logits": model(rows[0]).logits[0].tolist(),
        "kinds": sorted({type(layer.mlp.down_proj.weight).__name__ for layer in model.model.layers}),
    }


quantized = load(settings["folder"], quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
answer = {"float": measure(load(settings["folder"])), "int8": measure(quantized)}
quantized.save_pretrained(settings["output"])
answer["loaded"] = measure(load(settings["output"]))
print(json.dumps(answer))
