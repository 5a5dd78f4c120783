"""Settings that make any recipe a run of seconds."""

SMALL = [
    "tokenizer.vocab_size=300", "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "model.num_key_value_heads=1", "model.intermediate_size=32", "training.num_steps=4", "training.sequence_length=32",
    "training.global_batch_size=4", "training.per_device_batch_size=4", "training.evaluate_every=4",
    "samples.max_new_tokens=5", "training.log_every=1",
]  # fmt: skip


def small_settings(*more: str) -> list[str]:
    """--set options that make any recipe a run of seconds."""
    return [word for setting in [*SMALL, *more] for word in ("--set", setting)]
