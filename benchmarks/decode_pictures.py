"""The two pictures of `decode.py`; lines differ in marker and dash as well as in colour, for print without it."""

from pathlib import Path
from typing import Any

from decode_contenders import CONTENDERS
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

_INK, _GRID = "#33373d", "#e3e6ea"
# Colour, marker, dash, width: darker is faster, and ours are solid.
_STYLES = {
    CONTENDERS["no-cache"]: ("#b9bec6", "x", (0, (1, 1.5)), 1.4),
    CONTENDERS["static"]: ("#8fb58a", "^", (0, (4, 1.5, 1, 1.5)), 1.6),
    CONTENDERS["static-compiled"]: ("#5d8a5a", "v", (0, (4, 1.5, 1, 1.5)), 1.6),
    CONTENDERS["dynamic"]: ("#e0916c", "s", (0, (5, 2)), 1.8),
    CONTENDERS["tercet"]: ("#3b6ea8", "o", "-", 2.0),
    CONTENDERS["tercet-compiled"]: ("#16304f", "D", "-", 2.4),
}


def draw_decode(record: dict[str, Any], path: Path) -> None:
    """A column for each batch size; above, ms/token by context with the floor that memory sets; below, the ratio."""
    cells = record["sections"]["decode"]["cells"]
    done = [row for cell in cells for row in cell["contenders"].values() if "error" not in row]
    if not done:
        return
    batches = sorted({cell["batch_size"] for cell in cells})
    figure = _figure(3.7 * len(batches) + 0.9, 7.4)
    panels = figure.subplots(2, len(batches), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2))
    for column, batch_size in enumerate(batches):
        of_batch = sorted((c for c in cells if c["batch_size"] == batch_size), key=lambda cell: cell["context"])
        times, ratios = panels[0][column], panels[1][column]
        _draw_times(times, of_batch)
        _draw_ratios(ratios, of_batch)
        for axes in (times, ratios):
            _dress(axes, [cell["context"] for cell in of_batch])
        times.set_title(f"batch {batch_size}", loc="left", fontsize=11, color=_INK)
        ratios.set_xlabel("tokens in the cache", color=_INK)
    panels[0][0].set_ylabel("milliseconds per token", color=_INK)
    panels[1][0].set_title(f"times as fast as {cells[0]['reference']}", loc="left", fontsize=11, color=_INK)
    panels[0][0].set_ylim(min(map(_floor_ms, cells)) / 1.25, 1.3 * max(row["ms_per_token"]["high"] for row in done))
    panels[1][0].set_ylim(bottom=0)
    _head(figure, "Time per token", record)
    width, height = figure.get_size_inches()
    num_lines = _draw_legend(figure, panels[0])
    bottom = (0.75 + 0.24 * num_lines) / height
    figure.subplots_adjust(0.85 / width, bottom, 1 - 0.15 / width, 1 - 1.15 / height, wspace=0.08, hspace=0.17)
    figure.savefig(path)


def _draw_legend(figure: Figure, panels: Any) -> int:
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = list(dict.fromkeys(name for name in [*reversed(_STYLES), *handles] if name in handles))
    num_columns = max(1, int(figure.get_figwidth() / 2.9))
    figure.legend(
        [handles[name] for name in names], names, loc="lower left", frameon=False, ncols=num_columns, labelcolor=_INK,
        fontsize=9.5, handlelength=3.4, bbox_to_anchor=(0.6 / figure.get_figwidth(), 0.0),
    )  # fmt: skip
    return -(-len(names) // num_columns)


def _draw_line(axes: Axes, name: str, cells: list[dict[str, Any]], value: str) -> None:
    """Median and quartiles of one contender by context."""
    rows = [(cell["context"], cell["contenders"].get(name, {"error": "absent"})) for cell in cells]
    points = [(context, row[value]) for context, row in rows if "error" not in row]
    if not points:
        return
    color, marker, dash, width = _STYLES.get(name, (_INK, ".", "-", 1.5))
    axes.errorbar(
        [context for context, _ in points],
        [values["median"] for _, values in points],
        yerr=(
            [values["median"] - values["low"] for _, values in points],
            [values["high"] - values["median"] for _, values in points],
        ),
        label=name, color=color, marker=marker, linestyle=dash, linewidth=width, markersize=6, capsize=3, elinewidth=1,
    )  # fmt: skip


def _draw_times(axes: Axes, cells: list[dict[str, Any]]) -> None:
    contexts = [cell["context"] for cell in cells]
    for name in dict.fromkeys(name for cell in cells for name in cell["contenders"]):
        _draw_line(axes, name, cells, "ms_per_token")
    floor = [_floor_ms(cell) for cell in cells]
    axes.fill_between(contexts, floor, [min(floor) / 1000] * len(floor), color=_GRID, alpha=0.7, linewidth=0)
    axes.plot(contexts, floor, color="#7a818a", linewidth=1, label="weights + cache at full bandwidth")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(contexts[0] / 1.25, contexts[-1] * 1.25)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())


def _floor_ms(cell: dict[str, Any]) -> float:
    """How long the memory alone takes: what one token must read, at what a matrix-vector product read per second."""
    num_bytes = cell["weight_bytes_per_token"] + cell["cache_bytes_per_token"]
    return 1000 * num_bytes / cell["bytes_per_second"]["median"]


def _draw_ratios(axes: Axes, cells: list[dict[str, Any]]) -> None:
    axes.axhline(1, color="#7a818a", linewidth=1)
    for name in dict.fromkeys(name for cell in cells for name in cell["contenders"]):
        if name not in (cells[0]["reference"], CONTENDERS["no-cache"]):
            _draw_line(axes, name, cells, "times_as_fast")


def draw_uncached(record: dict[str, Any], path: Path) -> None:
    """On the left, seconds until the n-th token with and without a cache; on the right, their ratio."""
    section = record["sections"]["uncached"]
    curves = section["seconds_until_token"]
    cached, uncached = curves["cached"], curves["uncached"]
    numbers = list(range(1, len(cached) + 1))
    figure = _figure(9.6, 4.8)
    left, right = figure.subplots(1, 2)
    left.plot(numbers, uncached, color="#c8553d", linewidth=2, linestyle=(0, (5, 2)))
    left.plot(numbers, cached, color="#16304f", linewidth=2.4)
    for values, label, color in ((uncached, "without a cache", "#c8553d"), (cached, "with a cache", "#16304f")):
        at = int(len(values) * 0.72)
        left.annotate(
            label, (numbers[at], values[at]), xytext=(-8, 8), textcoords="offset points", ha="right", color=color
        )
    left.set_title("seconds until the n-th token is there", loc="left", fontsize=11, color=_INK)
    ratio = [without / with_cache for without, with_cache in zip(uncached, cached, strict=True)]
    right.plot(numbers, ratio, color="#16304f", linewidth=2.4)
    right.annotate(
        f"{ratio[-1]:.1f} x", (numbers[-1], ratio[-1]), xytext=(-6, 4), textcoords="offset points", ha="right",
        va="bottom", color="#16304f", fontweight="bold",
    )  # fmt: skip
    right.set_title("how many times as long it takes without", loc="left", fontsize=11, color=_INK)
    for axes in (left, right):
        _dress(axes)
        axes.set_xlim(0, len(numbers) * 1.02)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        axes.set_xlabel("new tokens n", color=_INK)
    prompt = f"a prompt of {section['prompt_tokens']} tokens, batch 1"
    _head(figure, "What the cache saves", record, prompt)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.12, wspace=0.14)
    figure.savefig(path)


def _figure(width: float, height: float) -> Figure:
    # Figure and canvas alone: pyplot would bring global state and look for a display.
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _head(figure: Figure, title: str, record: dict[str, Any], more: str = "") -> None:
    hardware = record["hardware"]
    device = f"{hardware['processor']}, {hardware['num_threads']} threads"
    parts = [
        f"{record['num_parameters'] / 1e6:.1f} M parameters, {record['dtype']}", more,
        device if hardware["device"] == "cpu" else hardware["device"],
    ]  # fmt: skip
    width, height = figure.get_size_inches()
    x = 0.35 / width
    figure.text(x, 1 - 0.36 / height, title, fontsize=15, fontweight="bold", color=_INK)
    figure.text(x, 1 - 0.62 / height, "  ·  ".join(filter(None, parts)), fontsize=10, color=_INK, alpha=0.75)


def _dress(axes: Axes, ticks: list[int] | None = None) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    if ticks is not None:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
