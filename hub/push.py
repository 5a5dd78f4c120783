"""`push_checkpoint`: a checkpoint folder, checked and published as one commit."""

from dataclasses import dataclass
from pathlib import Path

from tercet.hub.options import MAIN, PushOptions, check_names
from tercet.hub.preparation import Prepared, check_publishable, prepared_push
from tercet.hub.retries import Say, check_online
from tercet.hub.selection import PublishedFile


@dataclass(frozen=True)
class PushReport:
    """A push that went well.

    Attributes:
        url: Of the branch, for people.
        commit: That the branch ends with.
        is_new: Whether the push made it; False if all was there already.
        private: Whether the repository is.
        tags: On the commit.
        num_bytes: Of all files of the checkpoint.
        duration_s: Of the transfer.
        loading: Lines of Python that load it.
    """

    url: str
    commit: str
    is_new: bool
    private: bool
    tags: tuple[str, ...]
    num_bytes: int
    duration_s: float
    loading: tuple[str, str]


def push_checkpoint(
    checkpoint: Path,
    options: PushOptions,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    say: Say = print,
) -> PushReport:
    """Publish a checkpoint folder.

    Args:
        checkpoint: That `tercet train` wrote: a run's folder, or one of its checkpoints.
        token: None takes the user's own: HF_TOKEN, or what `hf auth login` keeps.
        endpoint: None takes HF_ENDPOINT, or the public Hub.
        say: Gets a line for what is done.

    Raises:
        UserError: One line that says what is wrong and what to do; the repository is as it was.
    """
    from huggingface_hub import HfApi, get_token

    from tercet.hub.upload import upload

    check_names(options)
    token = check_online(token or get_token())
    with prepared_push(checkpoint, options) as prepared:
        check_publishable(prepared, options, token)
        for note in prepared.notes:
            say(note)
        pushed = upload(prepared, options, HfApi(endpoint=endpoint, token=token), say)
        return PushReport(
            url=pushed.url,
            commit=pushed.commit,
            is_new=pushed.is_new,
            private=pushed.private,
            tags=prepared.tags,
            num_bytes=prepared.num_bytes,
            duration_s=pushed.duration_s,
            loading=loading_lines(prepared, options),
        )


def plan_push(checkpoint: Path, options: PushOptions) -> tuple[list[tuple[PublishedFile, int]], str | None]:
    """What a push would publish, with sizes, and why it would be refused, if it would; nobody is asked.

    Raises:
        UserError: There is nothing that could be published.
    """
    from tercet.training.errors import UserError

    with prepared_push(checkpoint, options) as prepared:
        sizes = [(file, file.size) for file in prepared.files]
        try:
            check_publishable(prepared, options)
        except UserError as error:
            return sizes, str(error)
        return sizes, None


def loading_lines(prepared: Prepared, options: PushOptions) -> tuple[str, str]:
    """The two lines that load tokenizer and model."""
    from tercet.hub.card_values import Loading

    settings = Loading(None if options.branch == MAIN else options.branch).options(prepared.needs_code)
    return (
        f'tokenizer = AutoTokenizer.from_pretrained("{options.repo_id}"{settings})',
        f'model = AutoModelForCausalLM.from_pretrained("{options.repo_id}"{settings})',
    )
