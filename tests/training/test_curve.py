"""The picture decodes to its size and shows what was recorded; every broken file is named."""

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from tercet.training.curve import SIZE_PIXELS, plot_losses, read_metrics, smooth


def write(path: Path, records: list[dict], torn: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)
    return path


def training(num_steps: int, **more: float) -> list[dict]:
    return [{"step": s, "tokens": 64 * s, "loss_nats": 2 + 5 / s, **more} for s in range(1, num_steps + 1)]


EVALUATION = {"step": 50, "tokens": 3200, "validation_loss_nats": 2.2, "validation_bits_per_byte": 1.3}


@pytest.mark.parametrize(
    "records",
    [
        training(1),
        [*training(50, learning_rate=0.01, tokens_per_second=100.0, grad_norm=1.0), EVALUATION],
        [*training(50, learning_rate=0.0), {"step": 50, "validation_loss_nats": 2.2}],
        [*training(5), {"step": 6, "tokens": 384, "loss_nats": math.nan}],
    ],
    ids=["one step", "everything", "no bits per byte", "diverged late"],
)
@pytest.mark.filterwarnings("error")
def test_png_decodes(tmp_path: Path, records: list[dict]) -> None:
    plot_losses(write(tmp_path / "metrics.jsonl", records), tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        image.load()
        assert (image.format, image.size) == ("PNG", SIZE_PIXELS)
        colors = image.convert("RGB").getcolors(maxcolors=2**24)
        assert colors is not None
        assert len(colors) > 50
    assert sorted(item.name for item in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_pyplot_is_not_touched(tmp_path: Path) -> None:
    import sys

    loaded = "matplotlib.pyplot" in sys.modules
    plot_losses(write(tmp_path / "metrics.jsonl", training(3)), tmp_path / "loss.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_last_record_of_a_step_wins_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    records = [*training(3), {"step": 2, "tokens": 128, "loss_nats": 9.0}, EVALUATION]
    metrics = read_metrics(write(tmp_path / "metrics.jsonl", records, torn='{"step": 4, "loss_na'))
    assert metrics.column("loss_nats") == [7.0, 9.0, 2 + 5 / 3]
    assert list(metrics.validation) == [50]
    assert all(math.isnan(rate) for rate in metrics.column("learning_rate"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing: `tercet train` writes it"),
        (b"", "holds no training step"),
        (b"\xff\xfe\n", "is not UTF-8"),
        (b'{"step": 1, "loss_nats": 2.0}\nnoise\n', "line 2, is not a JSON object"),
        (b'{"loss_nats": 2.0}\n', "line 1, is not a JSON object with a step"),
        (b"[1]\n", "line 1, is not a JSON object"),
        (b'{"step": 1, "loss_nats": NaN}\n', "no finite training loss"),
    ],
)
def test_errors(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        plot_losses(path, tmp_path / "loss.png")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_keeps_lines_and_constants() -> None:
    assert smooth([3.0] * 10, 2) == pytest.approx([3.0] * 10)
    line = [float(value) for value in range(10)]
    assert smooth(line, 3)[:7] == pytest.approx(line[:7])  # centred: no lag
    assert smooth([1.0, math.nan, 3.0], 1)[1] == pytest.approx(2.0)
    assert math.isnan(smooth([math.nan], 4)[0])
