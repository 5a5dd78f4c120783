"""`Trainer`: fine-tune, evaluate before and after, save; and the same few steps whole and accumulated.

Argument: JSON with `folder`, `output`, `texts`.
"""

import json
import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

settings = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(settings["folder"], trust_remote_code=True)
# On the left, for generation, as it is, the collator counts the first token of a padded row as one to predict.
tokenizer.padding_side = "right"
rows = Dataset.from_list([{"input_ids": ids} for ids in tokenizer(settings["texts"])["input_ids"]])


def make_trainer(**arguments):
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], trust_remote_code=True)
    defaults = {"output_dir": settings["output"], "use_cpu": True, "report_to": "none", "save_strategy": "no",
                "logging_steps": 1, "per_device_eval_batch_size": 1, "disable_tqdm": True, "seed": 0}  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def accumulated_losses(rows_at_once, accumulations):
    trainer = make_trainer(
        max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0,
        per_device_train_batch_size=rows_at_once, gradient_accumulation_steps=accumulations,
    )  # fmt: skip
    trainer.train()
    return losses(trainer)


trainer = make_trainer(max_steps=30, learning_rate=2e-3, per_device_train_batch_size=4, gradient_checkpointing=True)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
trainer.save_model()
trainer.model.eval()
with torch.no_grad():
    logits = trainer.model(torch.tensor([rows[0]["input_ids"]])).logits
torch.save(logits, settings["output"] + "/logits.pt")
print(
    json.dumps(
        {
            "before": before,
            "after": after,
            "losses": losses(trainer),
            "whole": accumulated_losses(8, 1),
            "accumulated": accumulated_losses(2, 4),
        }
    )
)
