"""peft's prefix tuning, whose prefix comes to the model as a filled cache.

Set to the keys and values of a real text, the prefix must do what that text does. Then it is trained, saved and loaded.
Argument: JSON with `folder`, `output`, `prefix`, `texts`.
"""

import json
import sys

import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
prefix = torch.tensor([tokenizer(settings["prefix"])["input_ids"]])
rows = [torch.tensor([ids]) for ids in tokenizer(settings["texts"])["input_ids"]]
num_virtual = prefix.shape[1]


def load_base():
    return AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True).eval()


def greedy(model, ids, num_tokens=16):
    return model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False)[0, ids.shape[1] :].tolist()


base = load_base()
with torch.no_grad():
    expected = base(torch.cat([prefix, rows[0]], dim=-1)).logits[:, num_virtual:]
    expected_tokens = greedy(base, torch.cat([prefix, rows[0][:, :6]], dim=-1))
    plain_tokens = greedy(base, rows[0][:, :6])
    layers = base(prefix, use_cache=True).cache.layers
    # (layers, key and value, heads, tokens, head_dim) -> a row for each virtual token, as peft keeps them
    states = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    states = states.permute(3, 0, 1, 2, 4).reshape(num_virtual, -1)

model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual)).eval()
with torch.no_grad():
    model.prompt_encoder["default"].embedding.weight.copy_(states)
    real_delta = float((model(input_ids=rows[0]).logits - expected).abs().max())
    real_tokens = greedy(model, rows[0][:, :6])

optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-1)
losses = []
for _ in range(10):
    model.train()
    for row in rows:
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
model.eval().save_pretrained(settings["output"])
loaded = PeftModel.from_pretrained(load_base(), settings["output"]).eval()
with torch.no_grad():
    trained = model(input_ids=rows[0]).logits
    loaded_delta = float((loaded(input_ids=rows[0]).logits - trained).abs().max())
print(
    json.dumps(
        {
            "num_virtual": num_virtual,
            "real_delta": real_delta,
            "real_tokens": real_tokens,
            "expected_tokens": expected_tokens,
            "plain_tokens": plain_tokens,
            "losses": losses,
            "loaded_delta": loaded_delta,
            "trained_tokens": greedy(model, rows[0][:, :6]),
            "loaded_tokens": greedy(loaded, rows[0][:, :6]),
        }
    )
)
