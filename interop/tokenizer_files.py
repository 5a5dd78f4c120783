"""A tokenizer that travels with its checkpoint: the same ids from the same text on the other side.

Its files are copied as they are where that is enough. It is not always: which class `AutoTokenizer` takes depends on
the model's type too, and some classes build their own pre-tokenizer over the file's. So what was written is loaded
again and compared, and written in another way if it answers otherwise.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tercet.interop.gguf_tokenizer import restore_words
from tercet.training.errors import UserError

_CONFIG = "tokenizer_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_FILES = (
    *_VOCABULARIES, _CONFIG, "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates",
)  # fmt: skip

# Words, numbers, spaces, code, several scripts, characters outside the basic plane, a combining mark, a control.
_PROBE = (
    "The quick brown fox, isn't it?  Two  spaces,\ttab\n\n  and 1234567.89 lines\r\n"
    "def f(x): return x**2 != 0\n    # C'est déjà l'été; Füße, naïve cafe\u0301\n"
    "Съешь же ещё этих мягких булок 我能吞下玻璃而不伤身体 日本語のテキスト مرحبا بالعالم नमस्ते 👩‍👩‍👧 \U0001d54f \x07 "
)


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or a GGUF file; None where a folder has none.

    Raises:
        UserError: There is one and it does not load, or it is a GGUF file's and splits text in a way not known here.
    """
    if source.is_file():
        folder, arguments = source.parent, {"gguf_file": source.name}
    elif any((source / name).is_file() for name in (*_VOCABULARIES, _CONFIG)):
        folder, arguments = source, {}
    else:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **arguments)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{source}: its tokenizer does not load: {reason}") from error
    if arguments:
        restore_words(tokenizer, source)
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, source: Path) -> None:
    """Refuse a tokenizer that has ids without a row of the embedding.

    Raises:
        UserError: Names the token with the highest id.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise UserError(
            f"{source}: its tokenizer is larger than the embedding: {token!r} has id {highest} and vocab_size is "
            f"{vocab_size}; use the tokenizer that the model was trained with, or resize_token_embeddings"
        )


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path, folder: Path) -> None:
    """Write a tokenizer into a model's folder, so that AutoTokenizer gives the same ids there.

    Args:
        source: Where it was loaded from; its files are copied as they are if that is enough.
        folder: Holds the model's config.json already, which has a part in the choice of the class.

    Raises:
        UserError: No way of writing it gives the same ids.
    """
    ways: list[Callable[[], object]] = []
    if source.is_dir() and _names_its_class(source):
        ways.append(lambda: _copy_files(source, folder))
    ways.append(lambda: tokenizer.save_pretrained(folder))
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        ways.append(lambda: _plain(tokenizer).save_pretrained(folder))
    expected = _answers(tokenizer)
    for write in ways:
        _remove_files(folder)
        write()
        written = load_tokenizer(folder)
        if written is not None and _answers(written) == expected:
            return
    raise UserError(f"{source}: its tokenizer gives other ids after it was written again ({type(tokenizer).__name__})")


def _names_its_class(source: Path) -> bool:
    """Whether the files say which class reads them; else it is guessed from the type of the model, which changes."""
    try:
        config = json.loads((source / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("tokenizer_class"))


def _copy_files(source: Path, folder: Path) -> None:
    for name in _FILES:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _remove_files(folder: Path) -> None:
    for name in _FILES:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _plain(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same pipeline under the class that adds nothing of its own."""
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        **tokenizer.special_tokens_map,
    )
    plain.chat_template = tokenizer.chat_template
    return plain


def _answers(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer makes of the probe, in a form that can be compared."""
    specials = sorted(map(str, tokenizer.all_special_tokens))
    text = _PROBE + " ".join(specials) + _PROBE.upper()
    ids: Any = tokenizer(text)["input_ids"]
    return {
        "ids": ids,
        "bare_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
        "text": tokenizer.decode(ids),
        "plain_text": tokenizer.decode(ids, skip_special_tokens=True),
        "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "specials": specials,
        "size": len(tokenizer),
        "chat_template": tokenizer.chat_template,
    }
