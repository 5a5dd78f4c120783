"""Load a folder through the Auto classes alone, as a reader does: logits of the first text, and each text's loss.

Argument: JSON with `folder`, `texts`, `file` (for the logits).
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True).eval()
rows = [torch.tensor([ids]) for ids in tokenizer(settings["texts"])["input_ids"]]
with torch.no_grad():
    torch.save(model(rows[0]).logits, settings["file"])
    losses = [float(model(row, labels=row).loss) for row in rows]
print(json.dumps({"model_class": type(model).__module__, "losses": losses}))
