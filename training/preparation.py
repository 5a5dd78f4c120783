"""From the recipe's sources to a tokenizer and to prepared data in the run's folder."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tercet.tokenizer import VocabularyTooLargeError, train_tokenizer
from tercet.tokenizer.reading import as_value_error
from tercet.training.atomic import place_files, temporary_folder
from tercet.training.counts import megabytes
from tercet.training.documents import DataError, Document
from tercet.training.duplicates import DuplicateFilter, normalized_digest
from tercet.training.errors import UserError, as_user_error
from tercet.training.from_checkpoint import FROM_CHECKPOINT
from tercet.training.recipe import Recipe
from tercet.training.run_folder import DATA_NAME
from tercet.training.shards import prepare
from tercet.training.skips import SkipReport
from tercet.training.sources import read_documents
from tercet.training.split import document_digest, is_validation, split_tail
from tercet.training.starting_weights import starting_tokenizer
from tercet.training.token_set import PreparedData
from tercet.training.untouched_files import SourceFiles

Say = Callable[[str], None]

_NAMED_SOURCES = 3


def make_tokenizer(
    recipe: Recipe, folder: Path, say: Say, *, texts: Iterator[str] | None = None
) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the one that an earlier call left, the recipe's folder, or a new one from the text.

    Args:
        texts: What a new one is trained on; None reads all text that does not validate.
    """
    settings = recipe.tokenizer
    saved = folder / "tokenizer.json"
    given = settings.path or (str(folder) if saved.is_file() else None)
    if recipe.model.get(FROM_CHECKPOINT) is not None:
        tokenizer, added = starting_tokenizer(recipe)
        more = f", and {', '.join(added)} added to it" if added else ""
        say(f"Tokenizer  {len(tokenizer):,} tokens, that of {settings.path}{more}")
    elif given is not None:
        tokenizer = load_tokenizer(given)
    else:
        if texts is None and not _shows_bars():
            say(f"Reading    {_source_names(recipe)}, to train a tokenizer of up to {settings.vocab_size:,} tokens")
        started = time.perf_counter()
        try:
            with as_user_error("tokenizer.vocab_size"):
                tokenizer = train_tokenizer(
                    training_texts(recipe) if texts is None else texts,
                    settings.vocab_size,
                    words=settings.words,
                    show_progress=_shows_bars(),
                    model_max_length=_longest(recipe),
                )
        except UserError as error:
            if isinstance(error.__cause__, VocabularyTooLargeError):
                raise UserError(f"{error}: --set tokenizer.vocab_size={error.__cause__.largest}") from error
            raise
        say(f"Tokenizer  {len(tokenizer):,} tokens, byte-level BPE, in {time.perf_counter() - started:.1f} s")
    if not saved.is_file():
        with temporary_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
            place_files(Path(temporary), folder, last=saved.name)
    return tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """A tokenizer folder, with the special tokens that training needs.

    Raises:
        UserError: No tokenizer there, or one without end-of-text or padding token.
    """
    if not Path(path).is_dir() and Path(path).is_absolute():
        raise UserError(f"tokenizer.path {path} is no folder")
    try:
        with as_value_error():
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        private = "" if Path(path).is_dir() else "; for a private one on the Hub set HF_TOKEN, or run `hf auth login`"
        raise UserError(
            f"{path} holds no tokenizer that AutoTokenizer loads ({str(error).splitlines()[0]}){private}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {path} has no end-of-text token (eos_token): set one and save it again")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(f"the tokenizer in {path} needs a pad_token of its own, other than its eos_token")
    return tokenizer


def all_documents(
    recipe: Recipe, *, skips: SkipReport | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Iterator[Document]:
    """Every document of every source, in the recipe's order.

    Args:
        skips: Counts the rows that give no document.
        tokenizer: Its chat template writes conversations; None takes the one of every tokenizer that Tercet trains.
    """
    for source in recipe.data.all_sources():
        yield from read_documents(source, skips=skips, tokenizer=tokenizer)


def training_texts(
    recipe: Recipe, *, skips: SkipReport | None = None, on_held_out: Callable[[str, str], None] | None = None
) -> Iterator[str]:
    """Texts of the training split only: a tokenizer that has seen the validation text flatters its bits per byte.

    Args:
        skips: Counts the rows that give no document.
        on_held_out: Called with each text of the validation split, and the label of its source.

    Raises:
        DataError: Every document is held out.
    """
    settings = recipe.data
    seen, digest_of = DuplicateFilter(), document_digest
    if settings.drop_duplicates == "normalized":
        digest_of = normalized_digest
    num_documents = num_texts = 0
    for document in all_documents(recipe, skips=skips):
        num_documents += 1
        if settings.drop_duplicates and seen.is_duplicate(digest_of(document.text)):
            continue
        # Without the special tokens of a chat template, which are no text to learn merges from.
        plain_texts = list(document.plain_texts())
        if settings.split_by == "tail":
            text, held_out = split_tail(document.text, settings.validation_fraction)
            texts = [text]
        elif is_validation(document.text, settings.validation_fraction):
            texts, held_out = [], "".join(plain_texts)
        else:
            texts, held_out = plain_texts, ""
        if held_out and on_held_out is not None:
            on_held_out(held_out, document.source)
        num_texts += any(texts)
        yield from texts
    if num_documents and not num_texts:
        raise DataError(
            f"every document ({num_documents}) is held out for validation: with few long documents use "
            "--set data.split_by=tail, which holds out the end of each"
        )


def make_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    say: Say,
    *,
    progress: bool,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
) -> PreparedData:
    """Tokenize into `folder/data`, or take up what is there.

    Args:
        workers: Processes that tokenize; None is the number of cores.
        part: (i, n) prepares part i of n, from 0, for `merge` to join.
    """
    files = SourceFiles.look(recipe, tokenizer, part)
    data = None if files is None else files.prepared(folder / DATA_NAME)
    if data is None:
        data = _read_and_prepare(recipe, tokenizer, folder / DATA_NAME, say, progress, workers, part)
        if files is not None and "merged_parts" not in data.settings:
            files.remember(folder / DATA_NAME, data)
    train, validation = data.train, data.validation
    say(
        f"Data       {_documents(train.num_documents)}, {megabytes(train.num_bytes)}, {train.num_tokens:,} tokens "
        f"to train on; {_documents(validation.num_documents)}, {validation.num_tokens:,} tokens held out"
    )
    if dropped := data.report.duplicates_dropped:
        say(f"           {_documents(dropped)} left out, equal to one before")
    for line in data.skips.lines():
        say(f"           {line}")
    return data


def _read_and_prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    data_dir: Path,
    say: Say,
    progress: bool,
    workers: int | None,
    part: tuple[int, int] | None,
) -> PreparedData:
    if not _shows_bars():
        say(f"Preparing  {_source_names(recipe)} into {data_dir}; what is tokenized already is kept")
    skips = SkipReport()

    def tell_replaced(different: list[str]) -> None:
        say(f"Replacing  the set in {data_dir}, which was made with other settings ({', '.join(different)})")

    return prepare(
        all_documents(recipe, skips=skips, tokenizer=tokenizer),
        tokenizer,
        data_dir,
        validation_fraction=recipe.data.validation_fraction,
        split_by=recipe.data.split_by,
        drop_duplicates=recipe.data.drop_duplicates,
        progress=progress,
        workers=workers,
        part=part,
        skips=skips,
        on_replaced=tell_replaced,
    )


def _shows_bars() -> bool:
    """Whether progress bars are seen; where they are not, a line at the start of what takes long stands for them."""
    return sys.stderr.isatty()


def _source_names(recipe: Recipe) -> str:
    labels = [source.label for source in recipe.data.all_sources()]
    more = f" and {len(labels) - _NAMED_SOURCES} more" if len(labels) > _NAMED_SOURCES else ""
    return ", ".join(labels[:_NAMED_SOURCES]) + more


def _documents(number: int) -> str:
    return f"{number:,} document{'' if number == 1 else 's'}"


def _longest(recipe: Recipe) -> int:
    return recipe.model.get("max_position_embeddings", recipe.training.sequence_length)
