"""Clients that shrink the weights while they load them."""

import pytest
import torch

from conformance.clients.packages import TORCHAO_FOLDER, run_program
from conformance.clients.reference import NUM_NEW_TOKENS, PROMPTS, TEXTS, count_equal

pytestmark = pytest.mark.slow


def loss_delta(reference, losses: list[float]) -> float:
    """Largest difference of a text's loss from the unquantized model's."""
    expected = [float(reference.nats(reference.ids(text)).mean()) for text in TEXTS]
    return max(abs(one - other) for one, other in zip(losses, expected, strict=True))


def relative_error(reference, logits: list[list[float]]) -> float:
    """Of the first text's logits, root mean squares."""
    expected = reference.logits(reference.ids(TEXTS[0]))
    return float((torch.tensor(logits) - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.client("torchao int8", "int8 weights by TorchAoConfig; saved, loaded")
def test_torchao(trained, reference, tmp_path, client_record):
    answer = run_program(
        "torchao_int8.py", tmp_path, TORCHAO_FOLDER,
        folder=trained.folder, prompts=PROMPTS, texts=TEXTS, max_new_tokens=NUM_NEW_TOKENS,
    )  # fmt: skip
    assert answer["float"]["tokens"] == reference.tokens
    assert answer["float"]["kinds"] == ["Parameter"]
    assert answer["int8"]["kinds"] == ["Int8Tensor"]
    assert 0 < relative_error(reference, answer["int8"]["logits"]) < 0.03
    assert loss_delta(reference, answer["int8"]["losses"]) < 0.03
    assert answer["loaded"] == answer["int8"]
    client_record(
        f"{count_equal(answer['int8']['tokens'], reference.tokens)}, largest change of a text's loss "
        f"{loss_delta(reference, answer['int8']['losses']):.3f}; the same after saving and loading"
    )


@pytest.mark.client("bitsandbytes 8-bit", "LLM.int8() weights by BitsAndBytesConfig, on the CPU")
def test_8_bit(trained, reference, tmp_path, client_record):
    client_record(_bitsandbytes(8, "Linear8bitLt", 0.05, trained, reference, tmp_path))


@pytest.mark.client("bitsandbytes 4-bit", "NF4 weights by BitsAndBytesConfig, on the CPU")
def test_4_bit(trained, reference, tmp_path, client_record):
    client_record(_bitsandbytes(4, "Linear4bit", 0.3, trained, reference, tmp_path))


def _bitsandbytes(bits, kind, tolerance, trained, reference, tmp_path) -> str:
    answer = run_program(
        "bitsandbytes_bits.py", tmp_path,
        folder=trained.folder, bits=bits, prompts=PROMPTS, texts=TEXTS, max_new_tokens=NUM_NEW_TOKENS,
    )  # fmt: skip
    assert answer["kinds"] == [kind]
    full = reference.model.get_memory_footprint()
    assert answer["bytes"] < 0.5 * full
    assert 0 < relative_error(reference, answer["logits"]) < tolerance
    assert loss_delta(reference, answer["losses"]) < tolerance
    return (
        f"{count_equal(answer['tokens'], reference.tokens)}, largest change of a text's loss "
        f"{loss_delta(reference, answer['losses']):.3f}; {answer['bytes'] / full:.0%} of the bytes"
    )
