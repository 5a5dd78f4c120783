"""ctranslate2: convert a native folder, then generate greedily and score texts.

Argument: JSON with `folder`, `output`, `prompts`, `texts`, `max_new_tokens`.
"""

import json
import sys

import ctranslate2
from transformers import AutoTokenizer

settings = json.loads(sys.argv[1])
converted = ctranslate2.converters.TransformersConverter(settings["folder"]).convert(settings["output"] + "/model")
generator = ctranslate2.Generator(converted, device="cpu", compute_type="float32", intra_threads=1)
tokenizer = AutoTokenizer.from_pretrained(settings["folder"])
prompts = [tokenizer.tokenize(prompt) for prompt in settings["prompts"]]
answers = generator.generate_batch(
    prompts, max_length=settings["max_new_tokens"], sampling_topk=1, include_prompt_in_result=False
)
scores = generator.score_batch([tokenizer.tokenize(text) for text in settings["texts"]])
print(
    json.dumps(
        {
            "tokens": [answer.sequences_ids[0] for answer in answers],
            "nats": [[-score for score in row.log_probs] for row in scores],
        }
    )
)
