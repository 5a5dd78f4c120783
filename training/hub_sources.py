"""Rows of a dataset of the Hugging Face Hub, read through `datasets`; what goes wrong on the way, in one line each.

A download that broke off goes on, and what met a 429 is asked again, by huggingface_hub; a stream is read on by
`datasets`. What neither of them does for a file that is downloaded whole, trying again after a 5xx or a connection that
was reset, is done here: what is in the cache by then is not downloaded again.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tercet.training.documents import DataError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REFERENCES_SHOWN = 8
_WAITS_S = (1.0, 4.0)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset, as a source names it.

    Attributes:
        path: "owner/name".
        name: Configuration.
        revision: Branch, tag or commit.
        streaming: Read it as it downloads, instead of keeping a copy in the cache.
        label: Under which messages name it.
    """

    path: str
    name: str | None
    split: str
    revision: str | None
    streaming: bool
    label: str


def is_hub_name(path: str) -> bool:
    """Whether a Hub dataset could be called so: "name" or "owner/name"."""
    return _NAME.fullmatch(path) is not None


def hub_rows(dataset: HubDataset, columns: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """(number, row) pairs of a Hub dataset's split, from 1; a row has at least the columns that are there.

    Raises:
        DataError: If it cannot be read, with the reason and the remedy in one line.
    """
    # Whatever data and network do shows as an exception of datasets, huggingface_hub, httpx, fsspec or pyarrow, which
    # have no base in common.
    try:
        rows = load_split(dataset)
        numbered = enumerate(only_columns(rows, columns), start=1)
    except Exception as error:
        raise DataError(reading_failed(dataset, error)) from error
    while True:
        try:
            numbered_row = next(numbered, None)
        except Exception as error:
            raise DataError(reading_failed(dataset, error)) from error
        if numbered_row is None:
            return
        yield numbered_row


def only_columns(rows: Any, columns: tuple[str, ...]) -> Any:
    """The dataset without columns that nobody asks for, which then are not decoded; whole if one of them is missing."""
    if rows.column_names and set(columns) <= set(rows.column_names):
        return rows.select_columns(list(columns))
    return rows


def load_split(dataset: HubDataset) -> Any:
    """The split as `datasets` gives it."""
    import datasets

    return tried_again(
        dataset,
        lambda: datasets.load_dataset(
            dataset.path, dataset.name, split=dataset.split, revision=dataset.revision, streaming=dataset.streaming
        ),
    )


def tried_again(dataset: HubDataset, work: Callable[[], Any]) -> Any:
    """What `work` asks the Hub for, asked again after what may be gone in a moment."""
    for wait_s in (*_WAITS_S, None):
        try:
            return work()
        except Exception as error:
            if wait_s is None or not _may_pass(error):
                raise
            _logger.warning("Hub dataset %r: %s Trying again in %g s.", dataset.label, _reason(error), wait_s)
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    """Whether the Hub had a fault of its own, or cut a connection that it had taken."""
    from huggingface_hub.errors import HfHubHTTPError

    return any(
        cause.response.status_code >= 500
        if isinstance(cause, HfHubHTTPError)
        else type(cause).__name__ in ("ReadError", "RemoteProtocolError")
        for cause in _chain(error)
    )


def reading_failed(dataset: HubDataset, error: Exception) -> str:
    """What went wrong, where, and the remedy, in one line."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    where, text = f"Hub dataset {dataset.label!r}", _one_line(error)
    causes = list(_chain(error))
    statuses = [cause.response.status_code for cause in causes if isinstance(cause, HfHubHTTPError)]
    if isinstance(error, DatasetNotFoundError):
        return _not_found(dataset, text)
    if 401 in statuses:
        return (
            f"{where}: the Hub does not take the token that is set. Make a new one in the Hub's settings and set "
            "HF_TOKEN to it, or unset HF_TOKEN for a public dataset."
        )
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes) or "OfflineModeIsEnabled" in text:
        return (
            f"{dataset.path} is no file or folder here, and {where} is not in the cache, and HF_HUB_OFFLINE forbids to "
            "download it. Check the path, or unset HF_HUB_OFFLINE."
        )
    if isinstance(error, (DataFilesNotFoundError, EmptyDatasetError)):
        return f"{where} holds no file of data that `datasets` can read. Check the name and the revision."
    if isinstance(error, RuntimeError) and "script" in text.lower():
        return (
            f"{where} is made by a script, which `datasets` no longer runs. Try revision: refs/convert/parquet, or "
            "give files."
        )
    if any(_is_of_network(cause) for cause in causes):
        return f"{where} could not be downloaded: {_reason(error)} Check the network, and run the same again later."
    if isinstance(error, ValueError) and re.search("config|split", text, re.IGNORECASE):
        slices = " A split that is streamed is read whole." if dataset.streaming and "[" in dataset.split else ""
        return f"{where}: {text} Set the source's name (configuration) and split to what there is.{slices}"
    return f"{where} cannot be read: {_reason(error)} Check the dataset and the source's settings."


def _not_found(dataset: HubDataset, text: str) -> str:
    """Missing, private, gated, or of another revision: the Hub answers the first two alike."""
    from huggingface_hub import constants, get_token

    where = f"Hub dataset {dataset.path!r}"
    if "gated" in text.lower():
        page = f"{constants.ENDPOINT}/datasets/{dataset.path}"
        return f"{where} is gated. Ask for access at {page}, and set HF_TOKEN to a token of the account that has it."
    if dataset.revision is not None and text.startswith("Revision"):
        there = _references(dataset.path)
        return f"{where} has no revision {dataset.revision!r}{there}. Give a branch, a tag or a commit."
    if get_token() is None:
        return (
            f"{dataset.path!r} is no file or folder here and no public dataset on the Hub. Check the name; for a "
            "private dataset set HF_TOKEN or run `hf auth login`."
        )
    return (
        f"{dataset.path!r} is no file or folder here and no dataset on the Hub that this token may see. Check the "
        "name, and whose token HF_TOKEN or `hf auth login` gives."
    )


def _references(path: str) -> str:
    """The branches and tags that there are, if the Hub tells."""
    from huggingface_hub import HfApi

    try:
        references = HfApi().list_repo_refs(path, repo_type="dataset")
    except Exception:  # the line is as true without them
        return ""
    names = [reference.name for reference in (*references.branches, *references.tags)]
    more = ", ..." if len(names) > _REFERENCES_SHOWN else ""
    return f"; it has {', '.join(map(repr, names[:_REFERENCES_SHOWN]))}{more}"


def _is_of_network(error: BaseException) -> bool:
    """Whether an exception tells of a connection, of which httpx and aiohttp have their own, or of a Hub in trouble."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(modules & {"httpx", "httpx2", "aiohttp"})


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _reason(error: BaseException) -> str:
    """The reason under wrappers such as "An error occurred while generating the dataset"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    """An exception's text up to the first example or empty line, as a sentence."""
    lines = [line.strip() for line in str(error).strip().split("\n\n")[0].splitlines()]
    kept = [line for line in lines if line and not re.match(r"Example|For more|`", line)]
    line = " ".join(kept) or type(error).__name__
    return line if line.endswith(".") else line + "."
