"""`generate_batch`: prompts of several lengths side by side in one paged cache.

Argument: JSON with `folder`, `prompts`, `max_new_tokens`.
"""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True).eval()
outputs = model.generate_batch(
    tokenizer(settings["prompts"])["input_ids"],
    generation_config=GenerationConfig(
        max_new_tokens=settings["max_new_tokens"],
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ),
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, page_size=8, max_batch_tokens=32),
    progress_bar=False,
)
# Requests end in any order; their names end in a number that counts up as they came.
in_order = sorted(outputs, key=lambda request_id: int(request_id.rpartition("_")[2]))
print(json.dumps({"tokens": [outputs[request_id].generated_tokens for request_id in in_order]}))
