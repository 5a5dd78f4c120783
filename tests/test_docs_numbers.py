"""The docs tell sizes of the recipes' models: each is computed here, from the recipe."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.info import describe
from tercet.modeling import TercetCache, TercetForCausalLM
from tercet.training.accounting import cache_bytes_per_token, cache_crossover, decode_flops_per_token, num_parameters
from tercet.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ONE_TOKEN = (DOCS / "one-token.md").read_text(encoding="utf-8")
CACHE_SIZE = (DOCS / "cache.md").read_text(encoding="utf-8").partition("\n## Size\n")[2].partition("\n## ")[0]
TIMES = chr(0xD7)
"""As the pages write shapes."""


def meta_model(name):
    """The model of a recipe, shapes alone."""
    recipe = load_recipe(name)
    with torch.device("meta"):
        return TercetForCausalLM(recipe.model_config_for(recipe.tokenizer.vocab_size, {}))


@pytest.fixture(scope="module")
def demo():
    return meta_model("demo")


@pytest.fixture(scope="module")
def letters(demo):
    """What the page's letters stand for."""
    config = demo.config
    return {
        "V": config.vocab_size, "E": config.hidden_size, "L": config.num_hidden_layers,
        "H": config.num_attention_heads, "K": config.num_key_value_heads, "D": config.head_dim,
        "I": config.intermediate_size, "T": load_recipe("demo").training.sequence_length,
    }  # fmt: skip


def test_one_token_names_the_sizes_of_the_demo(letters):
    rows = dict(re.findall(r"^\| ([A-Z]) \| .+ \| (\d+) \|$", ONE_TOKEN, re.MULTILINE))
    assert {letter: int(value) for letter, value in rows.items()} == letters


def test_one_token_writes_each_shape_in_the_sizes_of_the_demo(letters):
    """Where a row has a shape in letters and one in numbers, they are the same; S is T there."""
    sizes = {**letters, "S": letters["T"]}
    pairs = re.findall(r"(?:\||\*\*)[^|(]*\((B, [A-Z, ]+)\)[^|(]*(?:\| |\*\* = )\((B, [\d, ]+)\)", ONE_TOKEN)
    assert len(pairs) >= 10
    for symbols, numbers in pairs:
        assert ", ".join(str(sizes.get(symbol, symbol)) for symbol in symbols.split(", ")) == numbers, symbols


def test_one_token_tells_the_width_of_every_projection(demo):
    widths = {
        name.rpartition(".")[2]: (module.in_features, module.out_features)
        for name, module in demo.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    told = re.findall(r"((?:`\w+`(?:, | and )?)+) \((\d+) → (\d+)\)", ONE_TOKEN)
    named = {name for names, *_ in told for name in re.findall(r"`(\w+)`", names)}
    assert named == set(widths)
    for names, read, written in told:
        for name in re.findall(r"`(\w+)`", names):
            assert (int(read), int(written)) == widths[name], name


def test_one_token_counts_the_parameters(demo):
    total = 0
    tensors = dict(demo.named_parameters())  # tied ones once
    rows = re.findall(r"^\| (`.+) \| ([^|]+) \| (\d+)(?: each)? \| ([\d,]+) \|$", ONE_TOKEN, re.MULTILINE)
    for names, shape, copies, count in rows:
        names = re.findall(r"`(\w+)`", names)
        for name in names:
            of_name = [tensor for key, tensor in tensors.items() if key.split(".")[-2] == name]
            assert len(of_name) == int(copies), name
            assert {tuple(tensor.shape) for tensor in of_name} == {tuple(map(int, shape.split(f" {TIMES} ")))}, name
        told = sum(tensor.numel() for key, tensor in tensors.items() if key.split(".")[-2] in names)
        assert int(count.replace(",", "")) == told, names
        total += told
    assert total == num_parameters(demo), "a part of the model is in no row"
    assert f"**{total:,}**" in ONE_TOKEN


def test_every_long_number_is_printed_by_info_or_follows_from_it(demo, letters, tmp_path):
    """All numbers with a thousands separator, on the page and in the cache's section."""
    small: Any = meta_model("small").config
    demo.config.save_pretrained(tmp_path / "demo")
    printed = set(re.findall(r"\d+(?:,\d{3})+", describe(tmp_path / "demo")))
    first, second = (decode_flops_per_token(demo.config, context) for context in (1, 2))
    per_key = second - first
    in_table = set(re.findall(r"\| (\d+(?:,\d{3})+) \|$", ONE_TOKEN, re.MULTILINE))  # of the test before
    in_text = {f"{first - per_key:,}", f"{per_key:,}"}
    found = set(re.findall(r"\d+(?:,\d{3})+", ONE_TOKEN))
    assert found <= printed | in_table | in_text, found - printed - in_table - in_text
    for number in (*in_text, f"{first:,}", f"{decode_flops_per_token(demo.config, letters['T']):,}"):
        assert number in found
    bytes_per_token = cache_bytes_per_token(small, torch.float32)
    ungrouped = bytes_per_token * small.num_attention_heads // small.num_key_value_heads
    of_small = {f"{bytes_per_token:,}", f"{ungrouped:,}"}
    found = set(re.findall(r"\d+(?:,\d{3})+", CACHE_SIZE))
    assert of_small <= found <= printed | of_small, found - printed


def test_the_cache_of_the_demo_is_as_large_as_its_page_says(demo, letters):
    per_token = cache_bytes_per_token(demo.config, torch.float32)
    product = f"2 · {letters['L']} · {letters['K']} · {letters['D']} · 4 = **{per_token:,} bytes a token**"
    crossover = cache_crossover(demo.config, torch.float32, 4 * num_parameters(demo))
    assert product in " ".join(CACHE_SIZE.split())
    assert f"at {crossover:,} tokens" in " ".join(CACHE_SIZE.split())
    torch.manual_seed(0)
    model = TercetForCausalLM(demo.config).eval()
    cache = TercetCache(demo.config)
    with torch.no_grad():
        model(torch.arange(10)[None], cache=cache)
    held = f"{cache.length}, {cache.capacity}, {cache.nbytes} = {cache.capacity} · {per_token:,}"
    assert held.replace(",", "") in CACHE_SIZE.replace(",", "")


def test_grouped_queries_are_told_by_a_recipe_that_has_them(demo):
    small: Any = meta_model("small").config
    assert demo.config.num_key_value_heads == demo.config.num_attention_heads
    heads = f"has H = {small.num_attention_heads} and K = {small.num_key_value_heads}"
    assert heads in ONE_TOKEN
    groups = {2: "two", 3: "three", 4: "four"}
    assert f"{groups[small.num_attention_heads // small.num_key_value_heads]} query heads read" in ONE_TOKEN
    narrow = small.num_key_value_heads * small.head_dim
    wide = small.num_attention_heads * small.head_dim
    text = " ".join(ONE_TOKEN.split())
    assert f"are {small.hidden_size} → {narrow} where `q_proj` is {small.hidden_size} → {wide}" in text
    product = f"2 · {small.num_hidden_layers} · {small.num_key_value_heads} · {small.head_dim} · 4"
    assert f"{product} = **{cache_bytes_per_token(small, torch.float32):,} bytes" in " ".join(CACHE_SIZE.split())


@pytest.fixture(scope="module")
def counted():
    """Parameters of each recipe that says how many it has, by its name."""
    names = [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    said = [name for name in names if "parameters" in (ROOT / "recipes" / f"{name}.yaml").read_text().split("\n")[0]]
    return {name: num_parameters(meta_model(name)) for name in said}


def test_a_recipe_begins_with_its_number_of_parameters(counted):
    assert {"demo", "small", "base", "large"} <= set(counted)
    for name, count in counted.items():
        assert f"{count:,} parameters" in (ROOT / "recipes" / f"{name}.yaml").read_text().split("\n")[0], name


def test_no_page_tells_parameters_of_a_recipe_that_is_gone(counted):
    """Where the README and the docs show a run or a recipe, it is one of today's."""
    pages = [*ROOT.glob("README*.md"), *DOCS.glob("*.md")]
    told = {
        (page.name, number)
        for page in pages
        for number in re.findall(r"(\d+(?:,\d{3}){2,}) parameters", page.read_text(encoding="utf-8"))
    }
    assert {page for page, _ in told} >= {"README.md", "README.zh-CN.md", "training.md"}
    assert {number for _, number in told} <= {f"{count:,}" for count in counted.values()}, told
