"""trl's SFTTrainer with packing: what it measures on packed rows, before and after training on them.

Argument: JSON with `folder`, `output`, `texts`, `row_length`.
"""

import json
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True)
texts = Dataset.from_list([{"text": text} for text in settings["texts"]])
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=settings["output"], use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, packing=True, max_length=settings["row_length"], max_steps=20, learning_rate=2e-3,
        per_device_train_batch_size=2, per_device_eval_batch_size=64, seed=0,
    ),
    train_dataset=texts,
    eval_dataset=texts,
    processing_class=tokenizer,
)  # fmt: skip
packed = trainer.eval_dataset
before = trainer.evaluate()["eval_loss"]
trainer.train()
trainer.save_model()
print(
    json.dumps(
        {
            "rows": [row["input_ids"] for row in packed],
            "lengths": [row["seq_lengths"] for row in packed],
            "before": before,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "after": trainer.evaluate()["eval_loss"],
        }
    )
)
