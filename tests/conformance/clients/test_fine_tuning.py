"""Clients that train the checkpoint further; what they save is read by the package and by a process without it."""

import math

import pytest
import torch

from conformance.clients.packages import run_program
from conformance.clients.reference import TEXTS, Reference

pytestmark = pytest.mark.slow
PAIRS = [
    {"prompt": "The value of", "chosen": " the expression is true.", "rejected": " xkcd qqq"},
    {"prompt": "Return", "chosen": " a list of names.", "rejected": " zzz ???"},
    {"prompt": "If the", "chosen": " argument is given", "rejected": " 123 456"},
    {"prompt": "A class", "chosen": " has a name.", "rejected": " ((( )))"},
]
BETA = 0.1


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_loss(reference: Reference, texts: list[str]) -> float:
    """Mean over texts of each one's mean loss."""
    return mean([float(reference.nats(reference.ids(text)).mean()) for text in texts])


def max_delta(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.client("transformers Trainer", "30 steps, saved, loaded without Tercet; gradients accumulated or not")
def test_trainer(trained, reference, tmp_path, client_record):
    answer = run_program("trainer.py", tmp_path / "tuned", folder=trained.folder, texts=TEXTS)
    assert answer["before"] == pytest.approx(mean_loss(reference, TEXTS), abs=1e-4)
    assert answer["after"] < answer["before"] - 1
    # Rows of unequal length: a mean over tokens, not over the means of parts of a batch.
    assert answer["accumulated"] == pytest.approx(answer["whole"], abs=1e-5)
    loaded = run_program(
        "load_and_score.py", tmp_path / "loaded", folder=tmp_path / "tuned", texts=TEXTS, file=tmp_path / "logits.pt"
    )
    assert loaded["model_class"].startswith("transformers_modules.")
    assert mean(loaded["losses"]) == pytest.approx(answer["after"], abs=1e-5)
    trained_logits, loaded_logits = (
        torch.load(path) for path in (tmp_path / "tuned/logits.pt", tmp_path / "logits.pt")
    )
    delta = max_delta(trained_logits, loaded_logits)
    assert delta <= 1e-5
    client_record(
        f"loss {answer['before']:.2f} to {answer['after']:.2f}; saved folder: max \\|Δ logit\\| {delta:.0e}; "
        f"accumulated over 4 batches: loss equal to {max_step(answer):.0e}"
    )


def max_step(answer: dict) -> float:
    return max(abs(one - other) for one, other in zip(answer["whole"], answer["accumulated"], strict=True))


@pytest.mark.client("peft LoRA", "trained on all linear layers, saved, loaded, merged, the merged model saved")
def test_lora(trained, tmp_path, client_record):
    answer = run_program("peft_lora.py", tmp_path, folder=trained.folder, texts=TEXTS)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(answer["targets"]) == names
    first, last = mean(answer["losses"][:8]), mean(answer["losses"][-8:])
    assert last < first - 1
    assert answer["untrained_delta"] == 0  # a new adapter adds nothing
    assert answer["trained_delta"] > 1
    assert answer["loaded_delta"] <= 1e-5
    assert answer["merged_delta"] <= 1e-4
    assert answer["tokens"][0] == answer["tokens"][1] == answer["tokens"][2]
    merged = Reference(tmp_path / "merged")
    delta = max_delta(merged.logits(merged.ids(TEXTS[0])), torch.load(tmp_path / "logits.pt")[0])
    assert delta <= 1e-4
    client_record(
        f"loss {first:.2f} to {last:.2f}; max \\|Δ logit\\| loaded {answer['loaded_delta']:.0e}, merged and saved "
        f"{delta:.0e}; greedy tokens equal"
    )


@pytest.mark.client("peft prefix tuning", "a prefix set to a real text's keys and values; trained, saved, loaded")
def test_prefix_tuning(trained, tmp_path, client_record):
    answer = run_program(
        "peft_prefix.py", tmp_path, folder=trained.folder, prefix="The value of the expression is", texts=TEXTS
    )
    assert answer["real_delta"] <= 1e-4
    assert answer["real_tokens"] == answer["expected_tokens"]
    assert answer["plain_tokens"] != answer["expected_tokens"]
    first, last = mean(answer["losses"][:8]), mean(answer["losses"][-8:])
    assert last < first - 0.3
    assert answer["loaded_delta"] <= 1e-5
    assert answer["loaded_tokens"] == answer["trained_tokens"]
    client_record(
        f"as the text itself: max \\|Δ logit\\| {answer['real_delta']:.0e}, {len(answer['real_tokens'])} of "
        f"{len(answer['expected_tokens'])} greedy tokens equal; loss {first:.2f} to {last:.2f}; loaded: "
        f"{answer['loaded_delta']:.0e}"
    )


@pytest.mark.client("trl SFT", "SFTTrainer with packing: 20 steps on rows of several documents")
def test_packed_fine_tuning(trained, reference, tmp_path, client_record):
    answer = run_program("trl_sft.py", tmp_path, folder=trained.folder, texts=TEXTS, row_length=128)
    assert all(len(lengths) > 1 for lengths in answer["lengths"])
    documents = [
        list(part)
        for row, lengths in zip(answer["rows"], answer["lengths"], strict=True)
        for part in torch.tensor(row).split(lengths)
    ]
    documents = [torch.stack(part).tolist() for part in documents]

    def apart(model: Reference) -> float:
        return float(torch.cat([model.nats(document) for document in documents]).mean())

    leaking = float(torch.cat([reference.nats(row) for row in answer["rows"]]).mean())
    assert abs(leaking - apart(reference)) > 0.02
    assert answer["before"] == pytest.approx(apart(reference), abs=1e-4)
    tuned = Reference(tmp_path)
    assert answer["after"] < answer["before"] - 1
    assert answer["after"] == pytest.approx(apart(tuned), abs=1e-4)
    client_record(
        f"loss on packed rows {answer['before']:.4f}, on the documents alone {apart(reference):.4f} (it would be "
        f"{leaking:.2f} if they saw each other); trained to {answer['after']:.2f}"
    )


@pytest.mark.client("trl DPO", "DPOTrainer on pairs of answers, 12 steps")
def test_preferences(trained, reference, tmp_path, client_record):
    answer = run_program("trl_dpo.py", tmp_path, folder=trained.folder, pairs=PAIRS, beta=BETA)
    assert answer["before"]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    tuned = Reference(tmp_path)

    def logps(model: Reference, kind: str) -> torch.Tensor:
        sums = []
        for pair in PAIRS:
            ids = [*model.ids(pair["prompt"] + pair[kind]), model.tokenizer.eos_token_id]
            sums.append(-model.nats(ids)[len(model.ids(pair["prompt"])) - 1 :].sum())
        return torch.stack(sums)

    margins = BETA * sum(
        sign * (logps(tuned, kind) - logps(reference, kind)) for sign, kind in ((1, "chosen"), (-1, "rejected"))
    )
    after = answer["after"]
    assert after["eval_logps/chosen"] == pytest.approx(float(logps(tuned, "chosen").mean()), abs=1e-3)
    assert after["eval_rewards/margins"] == pytest.approx(float(margins.mean()), abs=1e-3)
    assert after["eval_loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), abs=1e-4)
    assert after["eval_loss"] < 0.3
    client_record(
        f"loss ln 2 to {after['eval_loss']:.2f}; margin {after['eval_rewards/margins']:.3f}, by our own log "
        f"probabilities {float(margins.mean()):.3f}"
    )
