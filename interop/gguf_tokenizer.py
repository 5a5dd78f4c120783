"""A byte-level BPE tokenizer as llama.cpp knows it, or a refusal.

llama.cpp does not run a pre-tokenizer's pattern: it looks a name up and runs its own code for it. So a tokenizer is
described only if what `tokenizer.json` says is, part by part, what that code does.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tercet.tokenizer.pretokenization import BLOOM_PATTERN, CLAUSES_PATTERN, LLAMA3_PATTERN
from tercet.training.errors import UserError

_PRE = "tokenizer.ggml.pre"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's token types

_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # one digit a word, else Llama 3's

# Name by (steps of the pre-tokenizer, ignore_merges): llama.cpp ties both to the name. `dbrx` is Llama 3's pattern
# where a word in the vocabulary still goes through the merges. `superbpe` parts numbers, in threes from their end, and
# nothing else, which with merges of clauses gives the ids of parted text: see `CLAUSES_PATTERN`.
_Step = tuple[str, str | bool]
_GPT2_STEPS: tuple[_Step, ...] = (("ByteLevel", True),)
_PRE_TOKENIZERS: dict[tuple[tuple[_Step, ...], bool], str] = {
    ((("Split", LLAMA3_PATTERN), ("ByteLevel", False)), True): "llama-bpe",
    ((("Split", LLAMA3_PATTERN), ("ByteLevel", False)), False): "dbrx",
    ((("Split", _QWEN2_PATTERN), ("ByteLevel", False)), False): "qwen2",
    ((("Split", BLOOM_PATTERN), ("ByteLevel", False)), False): "bloom",
    ((("Split", CLAUSES_PATTERN), ("ByteLevel", False)), False): "superbpe",
    ((("Digits", True), *_GPT2_STEPS), False): "smollm",
    (_GPT2_STEPS, False): "gpt-2",
}
# Other names for the same, and names of GPT-2's words that transformers rightly takes for them.
_ALIASES = {"starcoder": "smollm", "refact": "smollm", "command-r": "smollm"}
_ALIASES |= dict.fromkeys(("phi-2", "mpt", "olmo", "jais"), "gpt-2")

# Bytes as byte-level BPE writes them: what is no blank, then a blank; a letter of ASCII or a byte above it, then a
# mark; a digit beside what is none.
_ACROSS_WORDS = re.compile(
    "[^\u0120\u0109\u010a\u010d][\u0120\u0109\u010a\u010d]|[A-Za-z\xa1-\xff\u0122-\u0143][,.]"
    "|[0-9](?![0-9]|$)|[^0-9](?=[0-9])"
)


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> dict[str, Any]:
    """Everything that the file says of the tokenizer, by key.

    Args:
        model: Gives the number of rows of the embedding, one for each token, and the ids that end generation.

    Raises:
        UserError: The tokenizer is not one that llama.cpp can run, or has more tokens than the embedding has rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError("GGUF: the tokenizer has no tokenizer.json, which its vocabulary and merges are read from")
    settings = json.loads(backend.to_str())
    name = _pre_tokenizer_name(settings)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in settings["model"]["merges"]]
    if name == "superbpe":
        _check_merges_of_words(merges)
    rows = model.get_input_embeddings().weight
    assert isinstance(rows, torch.Tensor)
    tokens, types = _vocabulary(settings, len(rows))
    add_bos, add_eos = _added_ends(tokenizer)
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        # Without the key llama.cpp takes id 11 for the end, whatever that is.
        raise UserError("GGUF: the tokenizer has no end-of-text token (eos_token): set one, and save it again")
    bos = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else eos  # else 11, again
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        _PRE: name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.ggml.add_eos_token": add_eos,
    }
    if isinstance(tokenizer.pad_token_id, int):
        metadata["tokenizer.ggml.padding_token_id"] = tokenizer.pad_token_id
    if isinstance(tokenizer.unk_token_id, int):
        metadata["tokenizer.ggml.unknown_token_id"] = tokenizer.unk_token_id
    return metadata | _end_of_turn(model, eos) | _chat_templates(tokenizer)


def restore_words(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Give the tokenizer that transformers read from a GGUF file the words that the file names.

    transformers knows some of the names, and takes GPT-2's words for every other one: the ids would be wrong ones, and
    nothing would say so.

    Raises:
        UserError: A name whose words neither transformers nor Tercet knows.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    model, name = (fields[key].contents() if key in fields else None for key in ("tokenizer.ggml.model", _PRE))
    if model != "gpt2" or name is None:
        return
    backend: Any = tokenizer.backend_tokenizer
    known = {of: made for made, of in _PRE_TOKENIZERS.items()}
    name = _ALIASES.get(name, name)
    if name in known:
        steps, ignores_merges = known[name]
        backend.pre_tokenizer = pre_tokenizers.Sequence([_step(*step) for step in steps])
        assert isinstance(backend.model, models.BPE)
        backend.model.ignore_merges = ignores_merges
    elif _steps(json.loads(backend.to_str())["pre_tokenizer"]) == _GPT2_STEPS:
        raise UserError(
            f"{path}: {_PRE} is {name!r}, and how it splits text is not known here (known: {', '.join(sorted(known))}, "
            "and transformers' own): import the folder that the file was made from"
        )


def _step(kind: str, value: str | bool) -> pre_tokenizers.PreTokenizer:
    """A step as `_steps` read it."""
    if kind == "Split":
        return pre_tokenizers.Split(Regex(str(value)), behavior="isolated")
    if kind == "Digits":
        return pre_tokenizers.Digits(individual_digits=bool(value))
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(value))


def _pre_tokenizer_name(settings: dict[str, Any]) -> str:
    """llama.cpp's name for how text is cut into words; NFC is passed over, as by every GGUF of Qwen."""
    bpe = settings["model"]
    plain = not bpe.get("continuing_subword_prefix") and not bpe.get("end_of_word_suffix") and not bpe.get("dropout")
    if bpe.get("type") != "BPE" or bpe.get("byte_fallback") or not plain:
        raise UserError(f"GGUF: the tokenizer is no plain byte-level BPE (model {bpe.get('type')})")
    normalizer = settings.get("normalizer")
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise UserError(f"GGUF: llama.cpp has no normalizer {normalizer.get('type')} before a byte-level BPE")
    steps = _steps(settings.get("pre_tokenizer"))
    name = _PRE_TOKENIZERS.get((steps, bool(bpe.get("ignore_merges")))) if steps is not None else None
    if name is None:
        raise UserError(
            "GGUF: llama.cpp knows no pre-tokenizer that splits as this tokenizer does (known: Llama 3's as "
            "Tercet's, its clauses, GPT-2's, Qwen2's, BLOOM's, SmolLM's)"
        )
    return name


def _check_merges_of_words(merges: list[list[str]]) -> None:
    """That text need not be parted into words: so it is with merges that were learned inside them."""
    for merge in merges:
        if _ACROSS_WORDS.search("".join(merge)):
            raise UserError(
                f"GGUF: the merge {' '.join(merge)!r} joins what this tokenizer's pattern parts, and llama.cpp would "
                "follow it: train the tokenizer with its own pattern (`tercet tokenizer train --words clauses`)"
            )


def _steps(pre_tokenizer: dict[str, Any] | None) -> tuple[_Step, ...] | None:
    """The steps as `_PRE_TOKENIZERS` writes them; None if one of them is of no known kind."""
    if pre_tokenizer is None:
        return None
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    steps: list[_Step] = []
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                steps.append(("Split", pattern))
            case {"type": "Digits", "individual_digits": bool(individual)}:
                steps.append(("Digits", individual))
            # `trim_offsets` moves offsets, not tokens.
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(uses_regex)}:
                steps.append(("ByteLevel", uses_regex))
            case _:
                return None
    return tuple(steps)


def _vocabulary(settings: dict[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; llama.cpp wants one for each row of the embedding, so the rest is filled up."""
    by_id = {id_: (token, _NORMAL) for token, id_ in settings["model"]["vocab"].items()}
    for added in settings["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise UserError(f"GGUF: llama.cpp cannot match {added['content']!r} with lstrip, rstrip or single_word")
        by_id[added["id"]] = (added["content"], _CONTROL if added["special"] else _USER_DEFINED)
    num_tokens = max(by_id) + 1
    if num_tokens > num_rows:
        raise UserError(f"GGUF: the tokenizer has {num_tokens} tokens, and the embedding {num_rows} rows")
    entries = [by_id.get(id_, (f"[UNUSED{id_}]", _UNUSED)) for id_ in range(num_rows)]
    return [token for token, _ in entries], [kind for _, kind in entries]


def _added_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the tokenizer puts bos before a text and eos behind it, found by trying."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    whole: list[int] = tokenizer("a")["input_ids"]  # pyright: ignore[reportAssignmentType]
    for add_bos, add_eos in ((False, False), (True, False), (False, True), (True, True)):
        if whole == [tokenizer.bos_token_id] * add_bos + bare + [tokenizer.eos_token_id] * add_eos:
            return add_bos, add_eos
    raise UserError("GGUF: the tokenizer adds tokens to a text other than bos and eos, which llama.cpp cannot")


def _end_of_turn(model: PreTrainedModel, eos: int) -> dict[str, Any]:
    """A second id that ends generation, where the generation config names one."""
    generation_config = model.generation_config
    ends = generation_config.eos_token_id if generation_config is not None else None
    others = [id_ for id_ in ends if id_ != eos] if isinstance(ends, list) else []
    return {"tokenizer.ggml.eot_token_id": others[0]} if others else {}


def _chat_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name; llama.cpp's own is the one called default
        template = template.get("default")
    return {"tokenizer.chat_template": template} if template else {}
