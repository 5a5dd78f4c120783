"""The Markdown tables of `tokenizer.py`, made of its JSON alone."""

from statistics import median
from typing import Any

LANGUAGES = ("English", "Chinese", "code")


def tables(record: dict[str, Any]) -> str:
    """Everything that was measured."""
    parts = [
        f"`{record['command']}`, {record['date']}: {record['processor']}, {record['cores']} cores, tokenizers "
        f"{record['tokenizers']}, vocabulary {record['vocab_size']:,}.",
        training_table(record["sections"]["training"]),
    ]
    if "patterns" in record["sections"]:
        parts.append(patterns_table(record["sections"]["patterns"]))
    return "\n\n".join(parts)


def training_table(rows: list[dict[str, Any]]) -> str:
    """Seconds, memory and bytes per token by size; medians of the rounds, the range in brackets."""
    lines = [
        "| Corpus | Trained by | Seconds | Peak memory, MB | Text used, MB | Bytes per token, held out |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for kind, runs in row["runs"].items():
            name = {"tercet": "Tercet", "direct": "`tokenizers` directly"}[kind]
            cells = [f"{row['megabytes']:g} MB", name]
            if "error" in runs[-1]:
                lines.append(f"| {' | '.join(cells)} | {runs[-1]['error']} | | | |")
                continue
            seconds = [run["seconds"] for run in runs]
            peaks = [run["peak_bytes"] / 1e6 for run in runs]
            used = f"{runs[-1]['used_bytes'] / 1e6:.1f}" if "used_bytes" in runs[-1] else "all"
            cells += [_spread(seconds, 1), _spread(peaks, 0), used, f"{row['bytes_per_token'][kind]['all']:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def patterns_table(section: dict[str, Any]) -> str:
    """Bytes per token by language and, in brackets, how far behind the best of the patterns."""
    figures, tried = section["bytes_per_token"], section["patterns"]
    columns = [name for name in (*LANGUAGES, "many languages", "all") if name in section["bytes"]]
    best = {column: max(figures[name][column] for name in tried) for column in columns}
    headings = [f"{column} ({section['bytes'][column] / 1e6:.1f} MB)" for column in columns]
    lines = [
        f"Bytes per token on held-out text, trained on {section['megabytes']:g} MB (behind the best of the patterns):",
        "",
        f"| Pre-tokenization | Vocabulary | {' | '.join(headings)} |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    for name, row in figures.items():
        cells = [f"{row[column]:.3f} ({row[column] / best[column] - 1:+.1%})" for column in columns]
        lines.append(f"| {name} | {section['vocab_sizes'][name]:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    middle = f"{median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
