"""The tables and the picture of `data.py`, made from data.json alone."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INK, _GRID = "#33373d", "#e3e6ea"
_LABELS = {"tercet": "Tercet", "group_texts": "datasets.map + group_texts"}
_COLORS = {"tercet": "#16304f", "group_texts": "#e0916c"}
_HATCHES = {"tercet": "", "group_texts": "//"}  # told apart in print without colour, too
MEMORY_GOAL_BYTES = 600e6


def summary(values: list[float]) -> dict[str, Any]:
    """Median and extremes, and the values in the order in which they were measured."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "samples": values}


def tokens_per_second(run: dict[str, Any], *, without: str = "") -> float:
    """Tokens that the tokenizer made, by all seconds of a run but those of one part."""
    return run["num_tokens"] / sum(seconds for part, seconds in run["seconds"].items() if part != without)


def ratios(runs: dict[str, list[dict[str, Any]]], *, without: str = "") -> list[float]:
    """How many times as fast as the peer Tercet was in each round."""
    peers = [tokens_per_second(run, without=without) for run in runs["group_texts"]]
    return [tokens_per_second(ours) / peer for ours, peer in zip(runs["tercet"], peers, strict=True)]


def tables(record: dict[str, Any]) -> str:
    """Everything that was measured so far, as Markdown."""
    hardware, library = record["hardware"], record["versions"]
    head = (
        f"`{record['command']}`, {record['date']}: {hardware['processor']}, {hardware['num_cores']} cores, "
        f"{record['processes']} processes, datasets {library['datasets']}, tokenizers {library['tokenizers']}, "
        f"transformers {library['transformers']}. Vocabulary {record['vocab_size']:,}, rows of "
        f"{record['sequence_length']:,} tokens. Medians of the rounds (least to most)."
    )
    parts = [head, _preparation(record)]
    parts += [make(record) for name, make in (("resume", _resume), ("loader", _loader)) if name in record]
    return "\n\n".join(parts)


def _preparation(record: dict[str, Any]) -> str:
    lines = [
        "| MB of text | | tokens/s | largest process, MB | tokens dropped | seconds |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for size in record["preparation"]:
        for name, runs in size["runs"].items():
            speed = summary([tokens_per_second(run) for run in runs])
            memory = max(run["peak_bytes"] for run in runs) / 1e6
            last = runs[-1]
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in last["seconds"].items())
            lines.append(
                f"| {size['megabytes']:g} | {_LABELS[name]} | {speed['median']:,.0f} ({speed['min']:,.0f} to "
                f"{speed['max']:,.0f}) | {memory:,.0f} | {last['num_dropped'] / last['num_tokens']:.2%} | {parts} |"
            )
        whole, later = summary(ratios(size["runs"])), summary(ratios(size["runs"], without="read"))
        notes.append(
            f"{size['megabytes']:g} MB, {size['documents']:,} documents: Tercet is {whole['median']:.2f} times as fast "
            f"({whole['min']:.2f} to {whole['max']:.2f}); with the peer's reading left out {later['median']:.2f} times."
        )
    return "\n".join(lines) + "\n\n" + "\n".join(notes)


def _resume(record: dict[str, Any]) -> str:
    lines = ["| First batch at | seconds |", "|---|---|"]
    for name, value in record["resume"]["seconds"].items():
        lines.append(f"| {name} of an epoch | {value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f}) |")
    parts = record["resume"]["parts"]
    return "\n".join(lines) + (
        f"\n\nOf which opening {parts['open']:.3f}, packing {parts['pack']:.3f}, the batch {parts['batch']:.3f}; "
        f"{parts['num_rows']:,} rows."
    )


def _loader(record: dict[str, Any]) -> str:
    loader, demo = record["loader"], record["loader"]["demo_tokens_per_second"]
    lines = ["| Rows of | the loader feeds, tokens/s | times the demo's consumption |", "|---|---|---|"]
    for length, value in loader["tokens_per_second"].items():
        lines.append(f"| {length} | {value['median']:,.0f} | {value['median'] / demo:.0f} |")
    lines += ["", f"The demo trains on {demo:,.0f} tokens/s.", ""]
    lengths = list(loader["padding_fraction"]["best_fit"])
    lines += ["| Padding, rows of | " + " | ".join(lengths) + " |", "|---|" + "---|" * len(lengths)]
    for name, fractions in loader["padding_fraction"].items():
        lines.append(f"| {name} | " + " | ".join(f"{fractions[length]:.3%}" for length in lengths) + " |")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens per second on the left, the memory of the largest process on the right, by size of the corpus."""
    figure = Figure(figsize=(9.6, 4.4), dpi=150)
    FigureCanvasAgg(figure)
    speeds, memory = figure.subplots(1, 2)
    sizes = record["preparation"]
    for index, name in enumerate(_LABELS):
        places = [number + 0.38 * (index - 0.5) for number in range(len(sizes))]
        found = [summary([tokens_per_second(run) for run in size["runs"][name]]) for size in sizes]
        medians = [value["median"] for value in found]
        spread = (
            [value["median"] - value["min"] for value in found],
            [value["max"] - value["median"] for value in found],
        )
        style = {"color": _COLORS[name], "hatch": _HATCHES[name], "edgecolor": "white", "linewidth": 0}
        speeds.bar(places, medians, 0.36, yerr=spread, capsize=3, label=_LABELS[name], ecolor=_INK, **style)
        peaks = [max(run["peak_bytes"] for run in size["runs"][name]) / 1e6 for size in sizes]
        memory.bar(places, peaks, 0.36, **style)
    memory.axhline(MEMORY_GOAL_BYTES / 1e6, color="#7a818a", linewidth=1, linestyle=(0, (4, 2)))
    speeds.set_title("tokens prepared per second", loc="left", fontsize=11, color=_INK)
    memory.set_title("MB of memory, largest process (dashed: the goal)", loc="left", fontsize=11, color=_INK)
    for axes in (speeds, memory):
        axes.set_xticks(range(len(sizes)), [f"{size['megabytes']:g} MB" for size in sizes])
        axes.grid(axis="y", color=_GRID)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
    speeds.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value else "0")
    hardware = record["hardware"]
    figure.suptitle(
        f"{hardware['processor']}, {hardware['num_cores']} cores, {record['processes']} processes, vocabulary "
        f"{record['vocab_size']:,}, {record['date']}",
        x=0.06, y=0.985, ha="left", fontsize=9, color=_INK,
    )  # fmt: skip
    figure.legend(loc="lower left", bbox_to_anchor=(0.05, 0.0), ncols=2, frameon=False, labelcolor=_INK, fontsize=9.5)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.16, top=0.86, wspace=0.2)
    figure.savefig(path)
