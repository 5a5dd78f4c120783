"""trl's DPOTrainer on pairs of answers.

Argument: JSON with `folder`, `output`, `pairs` (prompt, chosen, rejected), `beta`.
"""

import json
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True)
reference = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True)
pairs = Dataset.from_list(settings["pairs"])
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=DPOConfig(
        output_dir=settings["output"], use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, max_length=96, max_steps=12, learning_rate=5e-4, beta=settings["beta"],
        per_device_train_batch_size=4, per_device_eval_batch_size=8, seed=0,
    ),
    train_dataset=pairs,
    eval_dataset=pairs,
    processing_class=tokenizer,
)  # fmt: skip
before = trainer.evaluate()
trainer.train()
trainer.save_model()
print(
    json.dumps(
        {
            "before": before,
            "after": trainer.evaluate(),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
    )
)
