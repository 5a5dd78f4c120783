"""Time per token of Tercet beside `LlamaForCausalLM` holding the same weights, in one interleaved run.

    python benchmarks/decode.py [--output DIR] [--sections decode prefill ...]      # CPU: float32, 32 M parameters
    python benchmarks/decode.py --shape 1.2B --dtype bfloat16 --batch 1 8 64        # on a GPU

**How a token is timed.** Every contender decodes greedily through `generate()`, from a cache that holds the same keys
and values, which Llama computed once. A logits processor that changes nothing notes the time at each step; ms/token is
the time from the first of these stamps to the last, divided by the steps between: the pace at which a user sees tokens
come, with all that `generate` does around a step. Left out is what is paid once an answer and not once a token: setting
`generate` up, and its first step, which transformers never compiles and in which a cache may move to a larger buffer.
Tercet's cache grows in none of the timed steps: a prompt leaves room for 128 at least. Where it grows, it copies its
past once and is half as long again; DynamicCache copies the past at every step.

**How contenders are compared.** Every round runs each of them once, in an order drawn anew, and measures in between
what a large matrix-vector product reads per second. Ratios are of runs of one round. Each has warmed up on the same
sizes; compiled ones twice, from an empty compiler (and, unless TORCHINDUCTOR_CACHE_DIR is set, from an empty cache of
kernels). A few prompts of random tokens are computed and repeated over the rows of larger batches, and weights are
random; neither changes the work. The tokens of all contenders are compared, run by run.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# A folder of this run's own, or compile times would be those of finding yesterday's kernels. Torch sets it otherwise.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/tercet-decode-{os.getpid()}")

import torch
from decode_contenders import CONTENDERS, SHAPES
from decode_pictures import draw_decode, draw_uncached
from decode_quality import quality_section
from decode_report import tables
from decode_sections import (
    SMOKE,
    Bench,
    Plan,
    decode_section,
    fork_section,
    prefill_section,
    quantized_section,
    uncached_section,
)
from decode_timing import reason, summary
from transformers.utils import logging

from tercet.training.hardware import describe_hardware, versions

SECTIONS = {
    "decode": decode_section,
    "prefill": prefill_section,
    "uncached": uncached_section,
    "quantized": quantized_section,
    "fork": fork_section,
}


def main() -> None:
    """Measure section by section, keep what is done, print tables."""
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        run(arguments)
    finally:
        if f"tercet-decode-{os.getpid()}" in os.environ["TORCHINDUCTOR_CACHE_DIR"]:
            shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


def read_arguments() -> argparse.Namespace:
    """The command line; lists are separated by spaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=[*SECTIONS, "quality"], help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all but static-compiled")
    parser.add_argument("--static-compiled", action="store_true", help="compile StaticCache, too, as transformers does")
    parser.add_argument("--batch", nargs="+", type=int, help="batch sizes of the section decode (default: 1 8 32)")
    parser.add_argument("--context", nargs="+", type=int, help="its contexts (default: 256 1024 4096)")
    parser.add_argument("--rounds", type=int, help="default: 7")
    parser.add_argument("--tokens", type=int, help="timed steps in a run (default: 64, less where they take long)")
    parser.add_argument("--new-tokens", type=int, help="tokens of the section uncached (default: 300)")
    parser.add_argument("--shape", choices=list(SHAPES), help="the model (default: 32M)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="a trained folder with its data, such as out/demo: for quality")
    parser.add_argument("--chunk", type=int, default=1, help="tokens that the section quality feeds at a time")
    parser.add_argument("--output", type=Path, help="a folder for decode.json, decode.png and uncached.png")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and two rounds: does it run?")
    arguments = parser.parse_args()
    if "quality" in (arguments.sections or ()) and arguments.checkpoint is None:
        parser.error("the section quality needs --checkpoint, such as out/demo")
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The default sizes, or the smallest, with what the command line says otherwise."""
    plan = SMOKE if arguments.smoke else Plan()
    given = {
        "shape": arguments.shape,
        "batches": tuple(arguments.batch or ()),
        "contexts": tuple(arguments.context or ()),
        "contenders": tuple(arguments.contenders or ()),
        "num_rounds": arguments.rounds,
        "num_tokens": arguments.tokens,
        "uncached_tokens": arguments.new_tokens,
    }
    plan = replace(plan, **{name: value for name, value in given.items() if value})
    chosen = {*plan.contenders, *(["static-compiled"] if arguments.static_compiled else [])}
    return replace(plan, contenders=tuple(key for key in CONTENDERS if key in chosen))


def run(arguments: argparse.Namespace) -> None:
    """Measure what was asked for; the record is written after every section."""
    plan = plan_of(arguments)
    name = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    bench = Bench(plan, device, getattr(torch, arguments.dtype), arguments.seed)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": str(date.today()),
        "hardware": describe_hardware(device).model_dump(),
        "versions": versions().model_dump(),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("OMP_", "MKL_", "KMP_"))},
        "dtype": arguments.dtype,
        "seed": arguments.seed,
        "plan": asdict(plan),
        "shape": asdict(SHAPES[plan.shape]),
        "num_parameters": bench.models[0].num_parameters(),
        "sections": {},
    }
    for section in arguments.sections or [*SECTIONS, *(["quality"] if arguments.checkpoint else [])]:
        try:
            if section == "quality":
                result = quality_section(arguments.checkpoint, arguments.chunk, device, bench.progress)
            else:
                result = SECTIONS[section](bench)
        except Exception as error:  # the other sections can still be measured
            result = {"error": f"failed: {reason(error)}"}
            bench.progress.note(f"section {section} failed: {reason(error)}")
        record["sections"][section] = result
        if bench.bandwidth.bytes_per_second:
            record["bytes_per_second"] = summary(bench.bandwidth.bytes_per_second)
        if arguments.output:
            save(record, arguments.output)
    bench.progress.note("")
    print(tables(record))


def save(record: dict[str, Any], folder: Path) -> None:
    """The numbers, and the pictures of what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "decode.json").write_text(json.dumps(record, indent=1) + "\n")
    for section, draw, name in (("decode", draw_decode, "decode.png"), ("uncached", draw_uncached, "uncached.png")):
        result = record["sections"].get(section)
        if result is not None and "error" not in result:
            draw(record, folder / name)


if __name__ == "__main__":
    main()
