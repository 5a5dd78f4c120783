"""A set of prepared data in one picture: lengths of documents, tokens by source, how rows fill.

The picture is made with matplotlib's Figure alone: no pyplot, so no global state and no display. It is read in grey as
well: what stands side by side differs in lightness or hatching, and every number that matters is written.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tercet.training.atomic import write_atomically
from tercet.training.data_info import RowFill, held_out, length_histogram, num_divided, row_fill, stored_lengths
from tercet.training.packing import pack
from tercet.training.token_set import PreparedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_DARK, _MIDDLE, _LIGHT, _INK, _GRID = "#1d3f63", "#7fa3c7", "#dfe8f1", "#33373d", "#e3e6ea"
_MAX_SOURCES = 12
_ROW_LENGTHS = (1 / 4, 1 / 2, 1, 2, 4)


def plot_data(data: PreparedData, path: Path, *, title: str, sequence_length: int) -> None:
    """Draw the set as a PNG of 1600 x 1120 pixels.

    Args:
        title: What the set is called.
        sequence_length: T; rows of a quarter, half, twice and four times as many tokens are shown beside it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    upper = figure.add_gridspec(1, 1, left=0.075, right=0.975, top=0.835, bottom=0.52)
    left = figure.add_gridspec(1, 1, left=0.075, right=0.41, top=0.385, bottom=0.075)
    right = figure.add_gridspec(1, 1, left=0.685, right=0.975, top=0.385, bottom=0.075)
    _draw_lengths(figure.add_subplot(upper[0]), stored_lengths(data), sequence_length)
    _draw_fill(figure.add_subplot(left[0]), _fills(data.train.document_lengths, sequence_length), sequence_length)
    _draw_sources(figure.add_subplot(right[0]), data)
    _head(figure, data, title)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(Path(path), image.getvalue())


def _fills(lengths: np.ndarray, sequence_length: int) -> list[RowFill]:
    """Fill for several row lengths, as far as there are tokens for ten rows."""
    num_tokens = int(lengths.sum())
    chosen = sorted({max(int(sequence_length * factor), 8) for factor in _ROW_LENGTHS})
    wanted = [T for T in chosen if num_tokens >= (T if sequence_length == T else 10 * T)]
    return [row_fill(lengths, pack(lengths, T)) for T in wanted]


def _draw_lengths(axes: "Axes", lengths: np.ndarray, sequence_length: int) -> None:
    from matplotlib.ticker import PercentFormatter

    histogram = length_histogram(lengths)
    places = np.arange(len(histogram.first))
    documents = histogram.documents / max(histogram.documents.sum(), 1)
    tokens = histogram.tokens / max(histogram.tokens.sum(), 1)
    axes.bar(places - 0.2, documents, width=0.4, color=_LIGHT, edgecolor=_DARK, linewidth=0.8, label="of the documents")
    axes.bar(places + 0.2, tokens, width=0.4, color=_DARK, edgecolor=_DARK, linewidth=0.8, label="of the tokens")
    bounds = [*histogram.first.tolist(), 2 * int(histogram.first[-1])]
    axes.set_xticks(np.arange(len(bounds)) - 0.5, [f"{n:,}" if n < 10**5 else _short(n) for n in bounds], fontsize=9)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, max(documents.max(), tokens.max()) * 1.14)
    row = np.log2(sequence_length) - np.log2(histogram.first[0]) - 0.5
    if -0.5 < row < len(places) - 0.5:
        axes.axvline(row, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"a row of {sequence_length:,}", (row, axes.get_ylim()[1]), xytext=(4, -3), textcoords="offset points",
            va="top", color=_INK, fontsize=9,
        )  # fmt: skip
    axes.set_title("Length of documents, in tokens", loc="left", fontsize=11, color=_INK)
    axes.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, labelcolor=_INK, fontsize=9, borderpad=0
    )
    _dress(axes, "y")


def _draw_fill(axes: "Axes", fills: list[RowFill], sequence_length: int) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_title("What packed rows hold", loc="left", fontsize=11, color=_INK, pad=20)
    if not fills:
        axes.text(0, 0.5, f"fewer tokens than one row of {sequence_length:,}", color=_INK, transform=axes.transAxes)
        axes.axis("off")
        return
    styles = (("whole documents", _DARK, ""), ("pieces of cut ones", _LIGHT, "////"), ("padding", "white", ""))
    for place, fill in enumerate(fills):
        left = 0.0
        for (label, color, hatch), part in zip(styles, (fill.whole, fill.cut, fill.padding), strict=True):
            axes.barh(
                place, part, left=left, height=0.66, color=color, hatch=hatch, edgecolor=_DARK, linewidth=0.8,
                label=label if place == 0 else None,
            )  # fmt: skip
            left += part
        axes.annotate(
            f"{fill.padding:.2%} padding", (1, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=8.5, color=_INK, fontweight="bold" if fill.sequence_length == sequence_length else "normal",
        )  # fmt: skip
    axes.set_yticks(range(len(fills)), [f"{fill.sequence_length:,}" for fill in fills])
    for label, fill in zip(axes.get_yticklabels(), fills, strict=True):
        label.set_fontweight("bold" if fill.sequence_length == sequence_length else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylabel("tokens in a row", color=_INK)
    axes.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=3, labelcolor=_INK, fontsize=8.5,
        handlelength=1.2, columnspacing=1.2, borderpad=0.2,
    )  # fmt: skip
    _dress(axes, "x")


def _draw_sources(axes: "Axes", data: PreparedData) -> None:
    from matplotlib.ticker import MaxNLocator

    reports = sorted(data.report.by_source.items(), key=lambda item: -item[1].tokens)
    shown = [(name, report.tokens) for name, report in reports[:_MAX_SOURCES]]
    if rest := reports[_MAX_SOURCES:]:
        shown[-1] = (f"{len(rest) + 1} others", shown[-1][1] + sum(report.tokens for _, report in rest))
    names = [name if len(name) <= 24 else "..." + name[-21:] for name, _ in shown]
    tokens = [number for _, number in shown]
    axes.barh(range(len(shown)), tokens, height=0.66, color=_MIDDLE, edgecolor=_DARK, linewidth=0.8)
    total, most = max(sum(tokens), 1), max(*tokens, 1)
    for place, number in enumerate(tokens):
        axes.annotate(
            f"{_short(number)}  {number / total:.0%}", (number, place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=_INK,
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), names, fontsize=8.5 if len(shown) > 6 else 10)
    axes.invert_yaxis()
    axes.set_ylim(max(len(shown), 3) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.5)  # room for the number behind the longest bar
    axes.xaxis.set_major_formatter(lambda value, _: _short(int(value)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_title("Tokens by source", loc="left", fontsize=11, color=_INK, pad=20)
    _dress(axes, "x")


def _short(number: int) -> str:
    """A number in at most four characters and a letter: 512, 1k, 1.5k, 20M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}" if number < 1000 * size else f"{number / size:,.0f}{letter}"
    return f"{number}"


def _dress(axes: "Axes", grid_axis: str) -> None:
    axes.grid(axis=grid_axis, color=_GRID, linewidth=0.8)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def _head(figure: "Figure", data: PreparedData, title: str) -> None:
    report = data.report
    num_ends = data.train.num_documents + data.validation.num_documents
    parts = [
        f"{report.documents:,} documents", f"{report.tokens:,} tokens", f"{report.bytes / 1e6:,.1f} MB",
        f"{report.bytes / max(report.tokens - num_ends, 1):.2f} bytes per token",
        f"{held_out(data):.1%} of the tokens held out",
    ]  # fmt: skip
    if count := num_divided(data):
        parts.append(f"{count:,} in two pieces")
    if dropped := report.duplicates_dropped + report.empty_dropped + data.skips.count():
        parts.append(f"{dropped:,} left out")
    figure.text(0.025, 0.945, f"Prepared data: {title}", fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.025, 0.905, "  ·  ".join(parts), fontsize=10, color=_INK, alpha=0.75)
