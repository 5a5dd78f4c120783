"""The matrix products of a training step and nothing else: time that no way of training in float32 can do without.

    python benchmarks/train_floor.py [--rounds 20] [--threads 2]

Each product of benchmarks/train.py's two shapes, forward and backward, by the faster of the libraries that PyTorch has
here: those with weights on operands of their own, those of attention (as blocks of 64 queries need them: half of the
scores and a bit) in batches. Between them nothing is computed, and results go into memory that is there already where
the library allows it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date

# Set before torch is imported: idle threads go to sleep between products otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")

import torch
from train import MEDIUM, TINY, matmul_rate
from train_contenders import Shape

from tercet.modeling.kernels_tercet import matmul_transposed
from tercet.training.hardware import processor_name

# Queries of a block of attention: it needs the keys up to its last query.
_BLOCK = 64
Product = Callable[[], object]


def main() -> None:
    """Measure both shapes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}, {date.today()}")
    for shape in (TINY, MEDIUM):
        with_weights, of_attention, rate = measure(shape, arguments.rounds)
        tokens = shape.batch_size * shape.sequence_length
        print(
            f"hidden {shape.hidden_size}, {shape.batch_size} x {shape.sequence_length}: products with weights "
            f"{with_weights * 1e3:.1f} ms, of attention {of_attention * 1e3:.1f} ms; at most "
            f"{tokens / (with_weights + of_attention):,.0f} tokens/s; 1024 x 1024 products at {rate / 1e9:.0f} GFLOP/s"
        )


def measure(shape: Shape, rounds: int) -> tuple[float, float, float]:
    """Seconds of a step's products with weights, of those of attention, and FLOP/s of large products meanwhile."""
    with_weights = sum(
        num_products * sum(min(_seconds(product, rounds) for product in libraries) for libraries in kinds)
        for num_products, kinds in _weight_products(shape)
    )
    of_attention = shape.num_hidden_layers * sum(_seconds(product, rounds) for product in _attention_products(shape))
    return with_weights, of_attention, statistics.median(matmul_rate() for _ in range(rounds))


def _weight_products(shape: Shape) -> list[tuple[int, list[list[Product]]]]:
    """For each size of weight how many there are, and its three products, each by every library."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    keys = hidden // shape.num_attention_heads * shape.num_key_value_heads
    layers = shape.num_hidden_layers
    sizes = [
        (2 * layers, hidden, hidden),
        (2 * layers, hidden, keys),
        (2 * layers, hidden, wide),
        (layers, wide, hidden),
        (1, hidden, shape.vocab_size),
    ]
    return [(number, _three_products(shape, inputs, outputs)) for number, inputs, outputs in sizes]


def _three_products(shape: Shape, num_inputs: int, num_outputs: int) -> list[list[Product]]:
    rows = shape.batch_size * shape.sequence_length
    states, gradient = torch.randn(rows, num_inputs), torch.randn(rows, num_outputs)
    weight = torch.randn(num_outputs, num_inputs)
    forward, for_states = torch.empty(rows, num_outputs), torch.empty(rows, num_inputs)
    for_weight = torch.empty(num_outputs, num_inputs)
    return [
        [lambda: torch.mm(states, weight.t(), out=forward), lambda: matmul_transposed(states, weight)],
        [lambda: torch.mm(gradient, weight, out=for_states), lambda: matmul_transposed(gradient, weight.t())],
        [lambda: torch.mm(gradient.t(), states, out=for_weight), lambda: matmul_transposed(gradient.t(), states.t())],
    ]


def _attention_products(shape: Shape) -> list[Product]:
    """A layer's: scores and weighted values, and the four of their backward pass (scores are kept)."""
    heads = shape.batch_size * shape.num_attention_heads
    head_dim = shape.hidden_size // shape.num_attention_heads
    products: list[Product] = []
    for end in range(_BLOCK, shape.sequence_length + 1, _BLOCK):
        queries, keys = torch.randn(heads, _BLOCK, head_dim), torch.randn(heads, end, head_dim)
        scores, to_keys = torch.randn(heads, _BLOCK, end), torch.randn(heads, end, _BLOCK)
        scored, of_queries, of_keys = torch.empty_like(scores), torch.empty_like(queries), torch.empty_like(keys)

        def block(
            queries: torch.Tensor = queries, keys: torch.Tensor = keys, scores: torch.Tensor = scores,
            to_keys: torch.Tensor = to_keys, scored: torch.Tensor = scored, of_queries: torch.Tensor = of_queries,
            of_keys: torch.Tensor = of_keys,
        ) -> None:  # fmt: skip
            for _ in range(2):  # q kᵀ, and the gradient of the probabilities
                torch.bmm(queries, keys.transpose(1, 2), out=scored)
            for _ in range(2):  # weighted values, and the gradient of the queries
                torch.bmm(scores, keys, out=of_queries)
            for _ in range(2):  # the gradients of keys and values
                torch.bmm(to_keys, queries, out=of_keys)

        products.append(block)
    return products


def _seconds(product: Product, rounds: int) -> float:
    """Median of a product's turns, each of some milliseconds."""
    product()
    started = time.perf_counter()
    product()
    repeats = max(1, int(5e-3 / max(time.perf_counter() - started, 1e-9)))
    turns = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            product()
        turns.append((time.perf_counter() - started) / repeats)
    return statistics.median(turns)


if __name__ == "__main__":
    main()
