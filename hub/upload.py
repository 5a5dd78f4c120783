"""Sends a prepared push: all of it as one commit, or nothing.

Weights travel before the commit, and the Hub keeps what has arrived under its hash: a push that was cut goes on where
it was when the same command is run again. The commit names the one it follows, so it fails where somebody else was
faster, and nothing of theirs is lost.
"""

import time
from dataclasses import dataclass

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from tercet.hub.options import MAIN, PushOptions
from tercet.hub.preparation import Prepared
from tercet.hub.repository import (
    Repository,
    check_front_matter,
    check_may_push,
    is_same,
    left_over,
    read_files,
    read_repository,
)
from tercet.hub.retries import MovedError, Patience, Say, is_transient, one_line_errors, status_of, told_waits
from tercet.hub.selection import PublishedFile

_ALREADY_THERE = 409


@dataclass(frozen=True)
class Pushed:
    """What is on the Hub now.

    Attributes:
        url: Of the branch, for people.
        commit: That the branch ends with.
        is_new: Whether the push made it; False if all was there already.
        private: Whether the repository is.
        duration_s: From the first request to the last.
    """

    url: str
    commit: str
    is_new: bool
    private: bool
    duration_s: float


def upload(prepared: Prepared, options: PushOptions, api: HfApi, say: Say, patience: Patience | None = None) -> Pushed:
    """Send it.

    Args:
        api: With endpoint and token.
        say: Gets a line for what is done, and for each wait.

    Raises:
        UserError: One line that says what failed and what is true of the repository now.
    """
    started = time.perf_counter()
    patience = patience or Patience(say)
    repo_id, endpoint = options.repo_id, str(api.endpoint)
    changed = "nothing was changed"
    with told_waits(say):
        with one_line_errors(options, endpoint=endpoint):
            repository = read_repository(api, options, patience)
            check_may_push(api, repository, prepared, options, patience)
            check_front_matter(api, repository, prepared, patience)
            if not repository.exists:
                patience.call("make the repository", lambda: _create(api, options))
                changed = f"{repo_id} was made, and is empty"
                say(f"made {repo_id}{' (private)' if options.private else ''}")
        with one_line_errors(options, endpoint=endpoint, changed=changed):
            if not repository.exists:
                repository = read_repository(api, options, patience)
            commit, is_new = _bring(prepared, options, api, repository, say, patience)
        with one_line_errors(options, endpoint=endpoint, changed=f"commit {commit[:8]} is there, its tag is not"):
            for tag in prepared.tags:
                patience.call(f"tag {tag}", lambda tag=tag: _put_tag(api, options, tag, commit, repository))
    url = f"{endpoint}/{repo_id}" + ("" if options.branch == MAIN else f"/tree/{options.branch}")
    return Pushed(url, commit, is_new, bool(repository.private), time.perf_counter() - started)


def _create(api: HfApi, options: PushOptions) -> None:
    api.create_repo(options.repo_id, private=options.private, exist_ok=True)


def _bring(
    prepared: Prepared, options: PushOptions, api: HfApi, repository: Repository, say: Say, patience: Patience
) -> tuple[str, bool]:
    """Bring the branch to what is to be published; returns its commit and whether that is new."""
    changed = [file for file in prepared.files if not is_same(file, repository.files.get(file.path))]
    removed = left_over(repository, prepared.files, options)
    is_new_branch = options.branch not in repository.branches and options.branch != MAIN
    if not changed and not removed and repository.head is not None:
        if is_new_branch:
            patience.call("make the branch", lambda: _create_branch(api, options, repository))
        return repository.head, False
    additions = [CommitOperationAdd(file.path, str(file.source)) for file in changed]
    deletions = [CommitOperationDelete(path, is_folder=False) for path in removed]
    say(
        f"{len(changed)} of {len(prepared.files)} files to send"
        + (f", {len(removed)} of an earlier push to remove" if removed else "")
    )
    # A .gitignore in the repository would leave files out of the commit without a word.
    patience.call("upload", lambda: api.preupload_lfs_files(
        options.repo_id, additions, revision=repository.base, free_memory=False, gitignore_content=""
    ))  # fmt: skip
    if is_new_branch:
        patience.call("make the branch", lambda: _create_branch(api, options, repository))
    try:
        return _commit(prepared, options, api, repository, [*additions, *deletions], removed, patience), True
    except BaseException:
        if is_new_branch:
            _remove_branch(api, options, repository)
        raise


def _commit(
    prepared: Prepared,
    options: PushOptions,
    api: HfApi,
    repository: Repository,
    operations: list[CommitOperationAdd | CommitOperationDelete],
    removed: list[str],
    patience: Patience,
) -> str:
    """Make the commit. Where it is not known whether it was made (a cut connection), the branch is looked at."""
    number = 0
    while True:
        try:
            made = api.create_commit(
                options.repo_id, operations, commit_message=prepared.message, revision=options.branch,
                parent_commit=repository.head,
            )  # fmt: skip
            return made.oid
        except (HfHubHTTPError, httpx2.TransportError) as error:
            if not is_transient(error) and status_of(error) not in (409, 412):
                raise
            head = patience.call("look at the branch", lambda: _head(api, options))
            if head is not None and head != repository.head:
                if _holds(api, options.repo_id, head, prepared.files, removed, patience):
                    return head
                raise MovedError(
                    f"{options.repo_id} was changed by someone else while this was on its way (commit {head[:8]}); "
                    f"nothing of it was replaced: look at it, then {options.again}"
                ) from error
            if not patience.waits("commit", error, number, conflicts_pass=True):
                raise
            number += 1


def _head(api: HfApi, options: PushOptions) -> str | None:
    refs = api.list_repo_refs(options.repo_id)
    return next((branch.target_commit for branch in refs.branches if branch.name == options.branch), None)


def _holds(
    api: HfApi, repo_id: str, commit: str, files: list[PublishedFile], removed: list[str], patience: Patience
) -> bool:
    there = patience.call("look at its files", lambda: read_files(api, repo_id, commit))
    return all(is_same(file, there.get(file.path)) for file in files) and not any(path in there for path in removed)


def _create_branch(api: HfApi, options: PushOptions, repository: Repository) -> None:
    try:
        api.create_branch(options.repo_id, branch=options.branch, revision=repository.head)
    except HfHubHTTPError as error:
        # Where it is now where we wanted it, an answer was lost, and this is our own.
        if status_of(error) != _ALREADY_THERE or _head(api, options) != repository.head:
            raise


def _remove_branch(api: HfApi, options: PushOptions, repository: Repository) -> None:
    """As far as that goes: what made the push fail may make this fail, too, and is what the user must hear of.

    A branch that has gone on holds a commit, ours or somebody else's, and stays.
    """
    try:
        if _head(api, options) == repository.head:
            api.delete_branch(options.repo_id, branch=options.branch)
    except (HfHubHTTPError, httpx2.TransportError):
        return


def _put_tag(api: HfApi, options: PushOptions, tag: str, commit: str, repository: Repository) -> None:
    repo_id = options.repo_id
    if repository.tags.get(tag) == commit:
        return
    try:
        api.create_tag(repo_id, tag=tag, revision=commit)
    except HfHubHTTPError as error:
        if status_of(error) != _ALREADY_THERE:
            raise
        there = {item.name: item.target_commit for item in api.list_repo_refs(repo_id).tags}
        if there.get(tag) == commit:  # an answer was lost, and this is our own
            return
        if not options.move_tag:  # somebody has made it meanwhile
            raise
        api.delete_tag(repo_id, tag=tag)
        api.create_tag(repo_id, tag=tag, revision=commit)
