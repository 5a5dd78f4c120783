"""bitsandbytes: 8-bit or 4-bit weights when loading; greedy tokens and losses beside those in full precision.

Argument: JSON with `folder`, `bits`, `prompts`, `texts`, `max_new_tokens`.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

settings = json.loads(sys.argv[1])
kinds = {
    8: BitsAndBytesConfig(load_in_8bit=True),
    4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
}
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
rows = [torch.tensor([ids]) for ids in tokenizer(settings["texts"])["input_ids"]]
prompts = [torch.tensor([ids]) for ids in tokenizer(settings["prompts"])["input_ids"]]
model = AutoModelForCausalLM.from_pretrained(
    settings["folder"],
    trust_remote_code=True,
    quantization_config=kinds[settings["bits"]],
    device_map="cpu",
    dtype=torch.float32,
).eval()
with torch.no_grad():
    tokens = [
        model.generate(ids, max_new_tokens=settings["max_new_tokens"], do_sample=False)[0, ids.shape[1] :].tolist()
        for ids in prompts
    ]
    print(
        json.dumps(
            {
                "tokens": tokens,
                "losses": [float(model(row, labels=row).loss) for row in rows],
                "logits": model(rows[0]).logits[0].tolist(),
                "kinds": sorted({type(layer.mlp.down_proj).__name__ for layer in model.model.layers}),
                "bytes": model.get_memory_footprint(),
            }
        )
    )
