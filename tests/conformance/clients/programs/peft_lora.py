"""peft's LoRA: train an adapter on every linear layer, save it, load it on the base, merge it into a plain model.

Argument: JSON with `folder`, `output`, `texts`.
"""

import json
import sys

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

settings = json.loads(sys.argv[1])
adapter, merged = settings["output"] + "/adapter", settings["output"] + "/merged"
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
rows = [torch.tensor([ids]) for ids in tokenizer(settings["texts"])["input_ids"]]


def logits_and_tokens(model):
    """After training in one class and loading in another, both must see the same."""
    model.eval()
    with torch.no_grad():
        tokens = model.generate(input_ids=rows[0][:, :6], max_new_tokens=16, do_sample=False)
        return model(input_ids=rows[0]).logits, tokens[0].tolist()


torch.manual_seed(0)
base = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True)
base_logits, _ = logits_and_tokens(base)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
untrained_logits, _ = logits_and_tokens(model)
targets = {name.partition(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=5e-3)
losses = []
for _ in range(10):
    model.train()
    for row in rows:
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
trained_logits, trained_tokens = logits_and_tokens(model)
model.save_pretrained(adapter)

loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, trust_remote_code=True)
loaded_logits, loaded_tokens = logits_and_tokens(loaded)
plain = loaded.merge_and_unload()
merged_logits, merged_tokens = logits_and_tokens(plain)
plain.save_pretrained(merged)
tokenizer.save_pretrained(merged)
torch.save(trained_logits, settings["output"] + "/logits.pt")


def delta(one, other):
    return float((one - other).abs().max())


print(
    json.dumps(
        {
            "targets": sorted(targets),
            "losses": losses,
            "untrained_delta": delta(untrained_logits, base_logits),
            "trained_delta": delta(trained_logits, base_logits),
            "loaded_delta": delta(loaded_logits, trained_logits),
            "merged_delta": delta(merged_logits, trained_logits),
            "tokens": [trained_tokens, loaded_tokens, merged_tokens],
            "merged_class": type(plain).__name__,
        }
    )
)
