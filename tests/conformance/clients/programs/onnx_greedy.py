"""onnxruntime: greedy tokens with keys and values handed from step to step; no PyTorch.

Argument: JSON with `path`, `prompts` (token ids), `max_new_tokens`.
"""

import json
import sys

import numpy as np
import onnxruntime

settings = json.loads(sys.argv[1])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(settings["path"], options, providers=["CPUExecutionProvider"])
caches = [given for given in session.get_inputs() if given.name.startswith("past_key_values.")]


def greedy(prompt):
    ids, length, tokens, first_logits = np.array([prompt]), 0, [], None
    past = {given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32) for given in caches}
    for _ in range(settings["max_new_tokens"]):
        start, length = length, length + ids.shape[1]
        positions = {"attention_mask": np.ones((1, length), np.int64), "position_ids": np.arange(start, length)[None]}
        logits, *present = session.run(None, {"input_ids": ids, **positions, **past})
        first_logits = logits if first_logits is None else first_logits
        past = dict(zip(past, present, strict=True))
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids[0, 0]))
    return tokens, first_logits[0].tolist()


tokens, logits = zip(*(greedy(prompt) for prompt in settings["prompts"]), strict=True)
assert "torch" not in sys.modules
print(json.dumps({"tokens": tokens, "logits": logits}))
