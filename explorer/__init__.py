"""Records one run of a causal language model and renders it as one self-contained HTML page.

>>> from tercet.explorer import render, trace
>>> page = render(trace(model, tokenizer, "The cat sat on the mat. The cat"))
"""

# At once and not lazily: importing `tercet.explorer.trace` first would leave the module where the function should be.
from tercet.explorer.files import load_trace, save_trace
from tercet.explorer.record import Sampling, Trace
from tercet.explorer.render import render
from tercet.explorer.trace import trace

__all__ = ["Sampling", "Trace", "load_trace", "render", "save_trace", "trace"]
