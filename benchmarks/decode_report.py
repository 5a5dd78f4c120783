"""The Markdown tables of `decode.py`, ready for docs/cache.md; all of them are made from decode.json alone."""

from collections.abc import Iterable
from typing import Any

from decode_contenders import REFERENCE

MIB = 2**20


def tables(record: dict[str, Any]) -> str:
    """Everything that was measured."""
    makers = {
        "decode": decode_tables, "prefill": prefill_table, "uncached": uncached_table, "quantized": quantized_table,
        "fork": fork_tables, "quality": quality_table,
    }  # fmt: skip
    parts = [header(record)]
    for name, section in record["sections"].items():
        parts.append(f"{name}: {section['error']}" if "error" in section else makers[name](section))
    return "\n\n".join(parts) + "\n"


def header(record: dict[str, Any]) -> str:
    """The machine, the versions, the model, the command."""
    hardware, versions, shape = record["hardware"], record["versions"], record["shape"]
    device = hardware["processor"] if hardware["device"] == "cpu" else hardware["device"]
    lines = [
        f"`{record['command']}`, {record['date']}: {device}, {hardware['num_threads']} threads, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, {record['dtype']}. Random weights: "
        f"{record['num_parameters'] / 1e6:.1f} M parameters, hidden {shape['hidden_size']}, "
        f"{shape['num_hidden_layers']} layers, {shape['num_attention_heads']}/{shape['num_key_value_heads']} heads of "
        f"{shape['head_dim']}, vocabulary {shape['vocab_size']}."
    ]
    if record.get("bytes_per_second"):
        rate = record["bytes_per_second"]
        lines.append(
            f"A matrix-vector product read {rate['median'] / 1e9:.3g} GB/s at the median over the whole run, "
            f"{rate['max'] / 1e9:.3g} at best."
        )
    return "\n".join(lines)


def decode_tables(section: dict[str, Any]) -> str:
    """Speed, ratio to the reference, share of the bandwidth, bytes; then what went wrong."""
    cells, names = section["cells"], _names(section["cells"])
    reference = REFERENCE if REFERENCE in names else names[0]
    others = [name for name in names if name != reference]
    ceiling = [name for name in names if any("bytes_per_second" in _done(cell, name) for cell in cells)]
    cached = [name for name in names if any(_done(cell, name).get("cache_bytes") for cell in cells)]
    parts = [
        "Milliseconds per token, median (quartiles):",
        _cell_table(cells, names, lambda cell, row: _spread(row["ms_per_token"])),
        f"Times as fast as {reference}, median of the rounds:",
        _cell_table(cells, others, lambda cell, row: f"{row['times_as_fast']['median']:.2f}"),
        "Share of the bandwidth that (weights + cache) read once per token amounts to, of the cell's median "
        "matrix-vector product (in brackets: of its best):",
        _cell_table(cells, ceiling, _share, {"MB": _megabytes_read, "ms": _floor}),
        "MiB that the cache holds at the end (with what concatenation holds beside it for a moment):",
        _cell_table(cells, cached, lambda cell, row: _held(row)),
        *_remarks(cells),
    ]
    return "\n\n".join(parts)


def _names(cells: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))


def _done(cell: dict[str, Any], name: str) -> dict[str, Any]:
    row = cell["contenders"].get(name, {})
    return {} if "error" in row else row


def _cell_table(cells: list[dict[str, Any]], names: list[str], show: Any, columns: dict[str, Any] | None = None) -> str:
    extra = columns or {}
    rows = []
    for cell in cells:
        values = [
            show(cell, row) if (row := _done(cell, name)) else _absence(cell["contenders"].get(name)) for name in names
        ]
        rows.append([str(cell["batch_size"]), str(cell["context"]), *(make(cell) for make in extra.values()), *values])
    return _markdown(["Batch", "Context", *extra, *names], sorted(rows, key=lambda row: (int(row[0]), int(row[1]))))


def _absence(row: dict[str, Any] | None) -> str:
    return "failed" if row and row["error"].startswith("failed") else "-"


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _spread(values: dict[str, Any], scale: float = 1.0) -> str:
    median, low, high = (_number(values[name] * scale) for name in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def _bytes_read(cell: dict[str, Any]) -> float:
    return cell["weight_bytes_per_token"] + cell["cache_bytes_per_token"]


def _megabytes_read(cell: dict[str, Any]) -> str:
    return f"{_bytes_read(cell) / 1e6:.0f}"


def _floor(cell: dict[str, Any]) -> str:
    return _number(1000 * _bytes_read(cell) / cell["bytes_per_second"]["median"])


def _share(cell: dict[str, Any], row: dict[str, Any]) -> str:
    if "bytes_per_second" not in row:
        return "-"
    rate, ceiling = row["bytes_per_second"], cell["bytes_per_second"]
    return f"{100 * rate / ceiling['median']:.0f} % ({100 * rate / ceiling['max']:.0f} %)"


def _held(row: dict[str, Any]) -> str:
    if not row["cache_bytes"]:
        return "-"
    passing = f" (+{row['passing_bytes'] / MIB:.3g})" if row["passing_bytes"] else ""
    return f"{row['cache_bytes'] / MIB:.3g}{passing}"


def _remarks(cells: list[dict[str, Any]]) -> list[str]:
    """Equality of tokens, compile times, failures: a line each, with the cells that it is said of."""
    places: dict[str, list[str]] = {}
    num_compared = num_equal = 0
    for cell in cells:
        place = f"{cell['batch_size']} x {cell['context']}"
        if cell["graphs_compiled_while_timed"]:
            places.setdefault("something was compiled while timed", []).append(place)
        for name, row in cell["contenders"].items():
            text = row.get("error") or _difference(row["first_difference"])
            if text:
                places.setdefault(f"{name}: {text}", []).append(place)
            if row.get("graphs_compiled") == 0:
                places.setdefault(f"{name}: nothing was compiled, the plain step ran", []).append(place)
            if "error" not in row and name != cell["reference"]:
                num_compared, num_equal = num_compared + 1, num_equal + (not text)
    references = ", ".join(sorted({str(cell["reference"]) for cell in cells}))
    lines = [f"- Greedy tokens equal to those of {references}: in {num_equal} of {num_compared} comparisons."]
    lines += [f"- {text} (batch x context: {', '.join(at)})" for text, at in places.items()]
    for name in _names(cells):
        times = [row["compile_s"] for cell in cells if (row := _done(cell, name)).get("graphs_compiled")]
        if times:
            lines.append(f"- {name}: compiling took {min(times):.0f} to {max(times):.0f} s for a batch and context")
    return ["\n".join(lines)]


def _difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return ""
    return (
        f"other tokens from step {difference['step']} on (row {difference['row']}: {difference['got']}, not "
        f"{difference['expected']}; without a cache their logits are {difference['logit_gap']:.1e} apart)"
    )


def _contender_table(head: list[str], contenders: dict[str, Any], show: Any) -> str:
    rows = [[name, *(show(row) if "error" not in row else [row["error"]])] for name, row in contenders.items()]
    width = len(head)
    return _markdown(head, [(row + ["-"] * width)[:width] for row in rows])


def _seconds_row(row: dict[str, Any]) -> list[str]:
    ratio = row.get("times_as_fast")
    return [_spread(row["seconds"], 1000), f"{ratio['median']:.3g}" if ratio else "-"]


def prefill_table(section: dict[str, Any]) -> str:
    """Milliseconds of reading a prompt."""
    parts = []
    for cell in section["cells"]:
        parts.append(f"Prefill of {cell['num_tokens']} tokens, batch {cell['batch_size']}:")
        parts.append(_contender_table(["", "ms", "times as fast"], cell["contenders"], _seconds_row))
    return "\n\n".join(parts)


def uncached_table(section: dict[str, Any]) -> str:
    """Time and ratio at some numbers of tokens."""
    curves = section["seconds_until_token"]
    total = len(curves["cached"])
    rows = []
    for number in sorted({max(1, round(total * share)) for share in (0.03, 0.1, 0.25, 0.5, 0.75, 1.0)}):
        cached, uncached = curves["cached"][number - 1], curves["uncached"][number - 1]
        rows.append([str(number), f"{cached:.3f}", f"{uncached:.3f}", f"{uncached / cached:.2f}"])
    difference = section["first_difference"]
    return "\n\n".join(
        [
            f"Seconds until the n-th token is there, after a prompt of {section['prompt_tokens']} (Tercet, batch 1, "
            f"median of {section['num_rounds']}):",
            _markdown(["n", "cached", "not cached", "ratio"], rows),
            f"- Without the cache: {_difference(difference) or 'the same greedy tokens'}.",
        ]
    )


def quantized_table(section: dict[str, Any]) -> str:
    """Speed and bytes of quantized caches."""
    cells, names = section["cells"], _names(section["cells"])
    return "\n\n".join(
        [
            "Quantized caches, milliseconds per token, median (quartiles):",
            _cell_table(cells, names, lambda cell, row: _spread(row["ms_per_token"])),
            "Their bytes as a share of the plain cache's, both as allocated at the end:",
            _cell_table(cells, names[1:], lambda cell, row: f"{row.get('share_of_plain_bytes', float('nan')):.3f}"),
            *_remarks(cells),
        ]
    )


def fork_tables(section: dict[str, Any]) -> str:
    """A fork beside a prefill; decoding from either."""
    first = next(iter(section["contenders"].values()))

    def show(row: dict[str, Any]) -> list[str]:
        share = "-"
        if "seconds" in first:
            share = f"{100 * row['seconds']['median'] / first['seconds']['median']:.3g} %"
        return [_spread(row["seconds"], 1000), share]

    cell = section["decode"]
    return "\n\n".join(
        [
            f"A prompt of {section['num_tokens']} tokens for {section['num_rows']} continuations:",
            _contender_table(["", "ms", "share"], section["contenders"], show),
            "Decoding from there, milliseconds per token:",
            _cell_table([cell], _names([cell]), lambda cell, row: _spread(row["ms_per_token"])),
            "MiB of the cache at the end (of a fork: what it stores itself):",
            _cell_table([cell], _names([cell]), lambda cell, row: _held(row)),
            *_remarks([cell]),
        ]
    )


def quality_table(section: dict[str, Any]) -> str:
    """Bits per byte by cache."""
    return "\n\n".join(
        [
            f"Bits per byte of the validation text of {section['checkpoint']} ({section['validation_bytes']:,} bytes), "
            f"tokens at a time: {section['chunk']}, windows of {section['window']}:",
            _contender_table(
                ["cache", "bits per byte", "change"],
                section["caches"],
                lambda row: [f"{row['bits_per_byte']:.4f}", f"{100 * row['change']:+.3f} %"],
            ),
        ]
    )
