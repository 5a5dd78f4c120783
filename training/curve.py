"""The loss curve of a run, drawn from `metrics.jsonl`.

The picture is made with matplotlib's Figure alone: no pyplot, so no global state and no display.
"""

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS_NAME = "metrics.jsonl"
SIZE_PIXELS = (1440, 960)
_DPI = 160
_LEFT, _RIGHT = 0.085, 0.905
_TRAIN, _VALIDATION, _INK, _GRID = "#3b6ea8", "#c8553d", "#33373d", "#e3e6ea"


@dataclass
class Metrics:
    """The two series of a run by step, the last record of each step: a resumed run writes some steps again."""

    train: dict[int, dict[str, Any]] = field(default_factory=dict)
    validation: dict[int, dict[str, Any]] = field(default_factory=dict)

    def column(self, name: str) -> list[float]:
        """One value per training step, NaN where a step did not record it."""
        return [float(self.train[step].get(name, math.nan)) for step in sorted(self.train)]


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`: lines with `loss_nats` are training steps, with `validation_loss_nats` evaluations.

    A last line without its newline was torn by a kill and is left out; any other broken line is an error.

    Raises:
        UserError: If the file is missing, holds a broken line, or holds no training step.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: `tercet train` writes it; give a folder that was trained") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: give the {METRICS_NAME} that `tercet train` wrote") from None
    metrics = Metrics()
    # Split on the newline alone: splitlines() would also cut at U+2028 inside a JSON string.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{path}, line {number}, is not a JSON object with a step: remove the line, or train again"
            ) from None
        if "loss_nats" in record:
            metrics.train[step] = record
        if "validation_loss_nats" in record:
            metrics.validation[step] = record
    if not metrics.train:
        raise UserError(f"{path} holds no training step (no line has loss_nats): train for at least one step")
    return metrics


def plot_losses(metrics_path: Path, output_path: Path) -> None:
    """Draw training and validation loss over the steps, and the learning rate below, as a PNG of `SIZE_PIXELS`.

    The right-hand axis reads the same curve in bits per byte, where evaluations recorded them.

    Raises:
        UserError: If the metrics cannot be read, or no training loss in them is finite.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics = read_metrics(metrics_path)
    losses = metrics.column("loss_nats")
    if not any(math.isfinite(loss) for loss in losses):
        raise UserError(f"{metrics_path} holds no finite training loss: the run diverged; lower the learning rate")
    width, height = SIZE_PIXELS
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    has_rate = any(math.isfinite(rate) for rate in metrics.column("learning_rate"))
    if has_rate:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
        _draw_learning_rate(lower, metrics)
        _dress(lower)
    else:
        upper = lower = figure.subplots()
    _draw_losses(upper, metrics, losses)
    _dress(upper)
    lower.set_xlabel("step", color=_INK)
    steps = sorted(metrics.train)
    lower.set_xlim(0 if steps[0] <= 1 else steps[0] - 1, steps[-1] * 1.02)
    _head(figure, metrics)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.subplots_adjust(left=_LEFT, right=_RIGHT, top=0.87, bottom=0.085, hspace=0.17)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(Path(output_path), image.getvalue())


def smooth(values: list[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on each side, NaN left out.

    Centred, because a trailing average lags where the loss falls: near the start as many neighbours are taken on both
    sides as there are before. At the end, where the curve is flat, only those after the value go missing.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for index in range(len(values)):
        half = min(reach, index)
        low, high = index - half, min(index + half + 1, len(values))
        number = counts[high] - counts[low]
        smoothed.append((sums[high] - sums[low]) / number if number else math.nan)
    return smoothed


def _draw_losses(axes: "Axes", metrics: Metrics, losses: list[float]) -> None:
    steps = sorted(metrics.train)
    if len(steps) < 20:
        axes.plot(steps, losses, color=_TRAIN, linewidth=2, marker="o", markersize=4, label="training")
    else:
        axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.28)
        reach = max(3, min(100, len(steps) // 40))
        axes.plot(steps, smooth(losses, reach), color=_TRAIN, linewidth=2, label="training, smoothed")
    at = sorted(metrics.validation)
    if at:
        values = [float(metrics.validation[step]["validation_loss_nats"]) for step in at]
        axes.plot(at, values, color=_VALIDATION, linewidth=1.2, marker="o", markersize=5, zorder=4, label="validation")
        _add_bits_per_byte(axes, metrics.validation[at[-1]])
    axes.set_ylabel("loss (nats per token)", color=_INK)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)


def _add_bits_per_byte(axes: "Axes", record: dict[str, Any]) -> None:
    """The second scale: on one text, bits per byte are nats per token times a constant."""
    loss, bits = float(record["validation_loss_nats"]), record.get("validation_bits_per_byte")
    if bits is None or not (math.isfinite(loss) and math.isfinite(bits) and loss > 0 and bits > 0):
        return
    ratio = bits / loss
    scale = axes.secondary_yaxis("right", functions=(lambda nats: nats * ratio, lambda bits: bits / ratio))
    scale.set_ylabel("bits per byte of validation text", color=_INK)
    scale.tick_params(colors=_INK, length=0)
    scale.spines["right"].set_visible(False)


def _draw_learning_rate(axes: "Axes", metrics: Metrics) -> None:
    from matplotlib.ticker import MaxNLocator

    rates = metrics.column("learning_rate")
    axes.plot(
        sorted(metrics.train), rates, color=_INK, linewidth=1.2, marker="o" if len(rates) < 20 else "", markersize=3
    )
    axes.set_ylim(0, 1.15 * max(rate for rate in rates if math.isfinite(rate)) or 1)
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.set_title("learning rate", loc="left", fontsize=10, color=_INK)


def _dress(axes: "Axes") -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def _head(figure: "Figure", metrics: Metrics) -> None:
    """The title and how far the run went; to the right, the last evaluation."""
    last = metrics.train[max(metrics.train)]
    parts = [f"{last['step']:,} step" + ("" if last["step"] == 1 else "s")]
    if "tokens" in last:
        parts.append(f"{last['tokens']:,} tokens")
    speeds = sorted(speed for speed in metrics.column("tokens_per_second") if math.isfinite(speed))
    if speeds:
        parts.append(f"median {speeds[len(speeds) // 2]:,.0f} tokens/s")
    figure.text(_LEFT, 0.945, "Loss over training", fontsize=15, fontweight="bold", color=_INK)
    figure.text(_LEFT, 0.905, "  ·  ".join(parts), fontsize=10, color=_INK, alpha=0.75)
    if metrics.validation:
        final = metrics.validation[max(metrics.validation)]
        loss = f"{final['validation_loss_nats']:.3f} nats per token"
        bits = final.get("validation_bits_per_byte")
        main, below = (loss, "") if bits is None else (f"{bits:.3f} bits per byte", f"  ·  {loss}")
        figure.text(_RIGHT, 0.945, main, fontsize=15, fontweight="bold", ha="right", color=_VALIDATION)
        figure.text(_RIGHT, 0.905, f"validation{below}", fontsize=10, ha="right", color=_VALIDATION)
