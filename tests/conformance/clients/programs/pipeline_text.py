"""`pipeline("text-generation")`: prompts one by one, as one padded batch, and as a chat message.

Argument: JSON with `folder`, `prompts`, `max_new_tokens`.
"""

import json
import sys

from transformers import pipeline

settings = json.loads(sys.argv[1])
generator = pipeline("text-generation", model=settings["folder"], trust_remote_code=True)
options = {"max_new_tokens": settings["max_new_tokens"], "do_sample": False, "return_full_text": False}


def texts(inputs, **more):
    return [answers[0]["generated_text"] for answers in generator(inputs, **options, **more)]


chats = [[{"role": "user", "content": prompt}] for prompt in settings["prompts"]]
print(
    json.dumps(
        {
            "model_class": type(generator.model).__module__,
            "alone": texts(settings["prompts"]),
            "batched": texts(settings["prompts"], batch_size=len(settings["prompts"])),
            "chats": texts(chats),
        }
    )
)
