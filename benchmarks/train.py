"""Training steps beside `LlamaForCausalLM` of the same shape, in a plain loop and in transformers' `Trainer`.

    python benchmarks/train.py [--sections medium tiny memory overhead] [--seconds 60] [--json FILE]

Speed: every contender is a process of its own; they take turns of most of a second on the same batches with the same
fused AdamW and clipping, and what is compared is neighbouring turns. Between the turns the machine's rate for float32
matrix products is measured, which model FLOPs are shown as a share of; rounds in which something else took the machine
do not count. Memory: what two steps add to a process at
their peak. Overhead: the whole of `tercet train` against its bare steps. Linux only.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from train_contenders import NAMES, Contender, Shape

from tercet.modeling import TercetConfig
from tercet.tokenizer import train_tokenizer
from tercet.training.accounting import flops_per_token
from tercet.training.documents import Document
from tercet.training.hardware import processor_name
from tercet.training.recipe import load_recipe
from tercet.training.shards import prepare

MEDIUM = Shape(8192, 8, 256, 384, 1024, 6, 6, 2)
TINY = Shape(1024, 8, 128, 128, 384, 4, 2, 2)
LARGE_VOCABULARY = Shape(49_152, 8, 1024, 384, 1024, 6, 6, 2)
SMOKE = Shape(300, 2, 32, 32, 64, 2, 2, 1)
SPEED_SECTIONS = {"medium": MEDIUM, "tiny": TINY, "smoke": SMOKE}
# Long enough that threads are awake and caches are a contender's own.
TURN_S = 0.7
# A round counts if the machine gave at least this share of its best rate before and after every turn of it.
QUIET = 0.85
PEERS = ["tercet", "llama", "trainer", "tercet-muon"]
COMPILED = ["tercet-compiled", "llama-compiled"]


def main() -> None:
    """Run the sections, print each as it is done, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = [*SPEED_SECTIONS, "memory", "overhead"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=["medium", "tiny", "memory", "overhead"])
    parser.add_argument("--seconds", type=float, default=60, help="for each speed section, compiling not counted")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=PEERS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/train.py", *sys.argv[1:]]),
        "hardware": f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}",
        "date": str(date.today()),
    }
    print(f"{record['hardware']}, {record['date']}")
    with tempfile.TemporaryDirectory() as folder:
        for section in arguments.sections:
            if section in SPEED_SECTIONS:
                shape = SPEED_SECTIONS[section]
                data = prepare_text(Path(folder) / section, shape)
                record[section] = compare_speed(
                    shape, data, arguments.contenders, arguments.seconds, arguments.threads
                )  # fmt: skip
                print_speed(shape, record[section])
            elif section == "memory":
                data = prepare_text(Path(folder) / section, LARGE_VOCABULARY)
                record[section] = compare_memory(LARGE_VOCABULARY, data, arguments.threads)
                print_memory(LARGE_VOCABULARY, record[section])
            else:
                record[section] = measure_overhead(Path(folder) / section)
                print_overhead(record[section])
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def prepare_text(folder: Path, shape: Shape) -> Path:
    """One long text, so that a row is a piece of it: both models then attend to whole rows."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics.values())
    tokenizer = train_tokenizer([text], min(shape.vocab_size, 4096))
    prepare(
        [Document(text, "topics")], tokenizer, folder,
        validation_fraction=0.05, split_by="tail", drop_duplicates=False, progress=False,
    )  # fmt: skip
    return folder


def compare_speed(
    shape: Shape, data: Path, names: list[str], seconds: float, num_threads: int
) -> dict[str, dict[str, float]]:
    """Tokens a second of each contender, ratios of neighbouring steps to the plain loop's, and the machine's rate."""
    contenders = {name: Contender(name, shape, data, num_threads) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for contender in contenders.values():
        for _ in range(3):
            contender.step()
    rates: list[list[float]] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(rates) < 3:
        order = names if len(rates) % 2 else list(reversed(names))
        rates.append([matmul_rate()])
        for name in order:
            times[name].append(contenders[name].turn(TURN_S))
            rates[-1].append(matmul_rate())
    peaks = {name: contender.close() for name, contender in contenders.items()}
    tokens = shape.batch_size * shape.sequence_length
    config = TercetConfig(**shape.model_fields(), qk_norm=False)
    flops = flops_per_token(config, shape.sequence_length, training=True)
    best = max(map(max, rates))
    kept = [index for index, measured in enumerate(rates) if min(measured) > QUIET * best]
    # A machine that is never quiet has no other rounds to show; the count tells.
    kept = kept if len(kept) >= 3 else list(range(len(rates)))
    by_round = [statistics.median(rates[index]) for index in kept]
    rows = {}
    for name, measured in times.items():
        values = [measured[index] for index in kept]
        speed = tokens / statistics.median(values)
        rows[name] = {
            "tokens_per_second": speed,
            "flops_per_second": speed * flops,
            "share_of_rate": statistics.median(tokens * flops / v / r for v, r in zip(values, by_round, strict=True)),
            "peak_bytes": peaks[name],
        }
        if "llama" in times:
            ratios = sorted(times["llama"][index] / measured[index] for index in kept)
            deciles = statistics.quantiles(ratios, n=10)
            rows[name].update(ratio=statistics.median(ratios), ratio_low=deciles[0], ratio_high=deciles[-1])
    machine = {
        "flops_per_second": statistics.median(by_round), "num_rounds": len(rates), "num_quiet_rounds": len(kept),
    }  # fmt: skip
    return {"machine": machine, **rows}


def matmul_rate(size: int = 1024) -> float:
    """FLOP/s of a float32 matrix product, the better of two."""
    left, right = torch.ones(size, size), torch.ones(size, size)
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        torch.mm(left, right)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def compare_memory(shape: Shape, data: Path, num_threads: int) -> dict[str, int]:
    """Bytes that two training steps add to a process at their peak."""
    peaks = {}
    for name in ("tercet", "llama"):
        contender = Contender(name, shape, data, num_threads)
        for _ in range(2):
            contender.step()
        peaks[name] = contender.close()
    return peaks


def measure_overhead(folder: Path, num_steps: int = 300) -> dict[str, float]:
    """Seconds of `num_steps` more steps of a whole run, checkpoints every 100 included, and of as many bare steps."""
    from tercet.training import train
    from tercet.training.loop import training_step

    durations = []
    short = 20
    import tercet.training.loop as loop

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = training_step(*args, **kwargs)
        durations.append(time.perf_counter() - started)
        return result

    walls, bare = [], []
    loop.training_step = timed  # type: ignore[assignment]
    try:
        for steps in (short, short + num_steps):
            durations.clear()
            recipe = load_recipe("small", [
                "data.path=python-docs", "data.split_by=tail", "data.validation_fraction=0.001",
                "training.sample_every=null", "tokenizer.vocab_size=1024", "model.hidden_size=128",
                "model.intermediate_size=384", "model.num_hidden_layers=4", "model.num_attention_heads=2",
                "model.num_key_value_heads=2", "training.sequence_length=128", "training.per_device_batch_size=8",
                "training.global_batch_size=8", f"training.num_steps={steps}", "training.log_every=10",
                "training.save_every=100", "training.evaluate_every=1000000", "samples.prompts=[]",
                "optimizer.name=adamw", f"output_dir={folder / str(steps)}",
            ])  # fmt: skip
            with open(os.devnull, "w") as silence:
                print(f"  {steps} steps ...", file=sys.stderr)
                outcome = train(recipe, say=lambda line: print(line, file=silence))
            assert outcome.loop is not None
            walls.append(outcome.loop.state.duration_s + outcome.loop.stalled_s)
            bare.append(sum(durations))
    finally:
        loop.training_step = training_step  # type: ignore[assignment]
    return {"num_steps": num_steps, "loop_s": walls[1] - walls[0], "steps_s": bare[1] - bare[0]}


def print_speed(shape: Shape, rows: dict[str, dict[str, float]]) -> None:
    """A table in Markdown."""
    machine = rows["machine"]
    print(
        f"\nhidden {shape.hidden_size}, {shape.num_hidden_layers} layers, {shape.num_attention_heads}/"
        f"{shape.num_key_value_heads} heads, vocabulary {shape.vocab_size}, {shape.batch_size} x "
        f"{shape.sequence_length}; {machine['num_quiet_rounds']} quiet rounds of "
        f"{machine['num_rounds']}, matrix products "
        f"{machine['flops_per_second'] / 1e9:.0f} GFLOP/s\n"
    )
    print(
        "| | tokens/s | x plain loop (10 to 90 %) | GFLOP/s | of the machine's rate | peak |\n|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        if name == "machine":
            continue
        ratio = "" if "ratio" not in row else f"{row['ratio']:.3f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        print(
            f"| {NAMES[name]} | {row['tokens_per_second']:,.0f} | {ratio} | {row['flops_per_second'] / 1e9:.0f} | "
            f"{row['share_of_rate']:.0%} | {row['peak_bytes'] / 2**20:,.0f} MiB |"
        )


def print_memory(shape: Shape, peaks: dict[str, int]) -> None:
    """A line."""
    print(
        f"\npeak of a step, vocabulary {shape.vocab_size}, {shape.batch_size} x {shape.sequence_length}: "
        + ", ".join(f"{NAMES[name]} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
        + f"; ratio {peaks['tercet'] / peaks['llama']:.3f}"
    )


def print_overhead(measured: dict[str, float]) -> None:
    """A line."""
    share = measured["loop_s"] / measured["steps_s"] - 1
    print(
        f"\nwhole loop, {measured['num_steps']} steps, a checkpoint every 100: {measured['loop_s']:.1f} s; its bare "
        f"steps {measured['steps_s']:.1f} s; overhead {share:.1%}"
    )


if __name__ == "__main__":
    main()
