"""A repository on the Hub as it is, and whether a push may change it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import httpx2
from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from tercet.hub.licenses import LICENSES_PAGE
from tercet.hub.options import MAIN, NATIVE_FAMILIES, PushOptions
from tercet.hub.preparation import Prepared
from tercet.hub.retries import Patience, status_of
from tercet.hub.selection import CARD_NAME, CONFIG_NAME, RECIPE_NAME, PublishedFile, what_is
from tercet.training.counts import counted
from tercet.training.errors import UserError
from tercet.training.results import RESULTS_NAME

# In every repository, or put there by its owner about whatever it holds.
_HOUSEKEEPING = (".gitattributes", ".gitignore", "*.md", "LICENSE*", "NOTICE*", "*.png", "*.jpg", "*.svg", "*.gif")


@dataclass(frozen=True)
class Repository:
    """What was found.

    Attributes:
        exists: Whether it is there at all.
        private: None if it is not there.
        branches: Commit at the end of each.
        tags: Commit under each.
        base: Branch that the files are of: the wanted one, or main where that is still to be made.
        files: On it, by path.
    """

    exists: bool = False
    private: bool | None = None
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    base: str = MAIN
    files: dict[str, RepoFile] = field(default_factory=dict)

    @property
    def head(self) -> str | None:
        """The commit that a push goes on from."""
        return self.branches.get(self.base)


def read_repository(api: HfApi, options: PushOptions, patience: Patience) -> Repository:
    """Look at the repository; what cannot be seen with this token counts as not there."""
    repo_id = options.repo_id
    try:
        info = patience.call("look at the repository", lambda: api.model_info(repo_id))
        refs = patience.call("look at its branches", lambda: api.list_repo_refs(repo_id))
    except RepositoryNotFoundError as error:
        if status_of(error) == 401:  # no token, or one that the Hub does not know
            raise
        return Repository()
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    base = options.branch if options.branch in branches else MAIN
    files: dict[str, RepoFile] = {}
    if base in branches:
        files = patience.call("look at its files", lambda: read_files(api, repo_id, branches[base]))
    return Repository(
        exists=True,
        private=bool(info.private),
        branches=branches,
        tags={tag.name: tag.target_commit for tag in refs.tags},
        base=base,
        files=files,
    )


def read_files(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """All files of a commit by path."""
    try:
        entries = list(api.list_repo_tree(repo_id, recursive=True, revision=commit))
    except RevisionNotFoundError:  # an empty branch
        return {}
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def is_same(file: PublishedFile, there: RepoFile | None) -> bool:
    """Whether the Hub has a file's very content: by SHA-256 where it stores it apart, else by git's hash."""
    if there is None or there.size != file.size:
        return False
    if there.lfs is not None:
        with file.source.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == there.lfs.sha256
    content = file.source.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == there.blob_id


def left_over(repository: Repository, files: Sequence[PublishedFile], options: PushOptions) -> list[str]:
    """Files to remove in the same commit.

    Those that an earlier push has written and this one does not write, such as the shards of larger weights: beside the
    new ones they would be loaded, or mislead. With `replace`, all but what tells about the repository.
    """
    written = {file.path for file in files}
    others = [path for path in sorted(repository.files) if path not in written]
    if options.replace:
        return [path for path in others if not _is_housekeeping(path)]
    return [path for path in others if _is_earlier_push(path)]


def _is_earlier_push(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (not folder or folder in NATIVE_FAMILIES) and what_is(name) not in (None, "licence", "card")


def _is_housekeeping(path: str) -> bool:
    return any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in _HOUSEKEEPING)


def check_may_push(
    api: HfApi, repository: Repository, prepared: Prepared, options: PushOptions, patience: Patience
) -> None:
    """Refuse to change a repository that is not what the user thinks it is.

    Raises:
        UserError: It is public and should be private, or the other way; it holds another model, or none but other
            files; a tag is there already.
    """
    if not repository.exists:
        return
    repo_id = options.repo_id
    if options.private is not None and options.private != repository.private:
        now, wanted = ("private", "public")[:: 1 if repository.private else -1]
        raise UserError(
            f"{repo_id} is {now} and should be {wanted}: change that in its settings on the Hub, or give "
            + options.spelled(f"--{now}", f"private: {str(bool(repository.private)).lower()}")
        )
    for tag in prepared.tags:
        if tag in repository.tags and not options.move_tag and not _is_at_same(repository, tag, prepared, options):
            raise UserError(
                f"{repo_id} has a tag {tag} already, at commit {repository.tags[tag][:8]}: remove it there, or give "
                "another with --tag"
            )
    if not options.replace:
        _check_content(api, repository, prepared, options, patience)


def _is_at_same(repository: Repository, tag: str, prepared: Prepared, options: PushOptions) -> bool:
    return (
        repository.tags[tag] == repository.head
        and all(is_same(file, repository.files.get(file.path)) for file in prepared.files)
        and not left_over(repository, prepared.files, options)
    )


def _check_content(
    api: HfApi, repository: Repository, prepared: Prepared, options: PushOptions, patience: Patience
) -> None:
    repo_id = options.repo_id
    content = [path for path in repository.files if not _is_housekeeping(path)]
    remedy = "choose another repository or branch"
    remedy += "" if options.from_recipe else ", or --replace to put this model in its place"
    if not content:
        return
    if CONFIG_NAME not in content:
        raise UserError(f"{repo_id} holds {counted(len(content), 'file')} and no model, such as {content[0]}: {remedy}")
    theirs = patience.call("look at its model", lambda: _model_type(api, repo_id, repository.head))
    # A run's own record says that an export was here, or is to come.
    is_run = RECIPE_NAME in content and RESULTS_NAME in content and theirs in ("tercet", *NATIVE_FAMILIES)
    if theirs != prepared.model_type and not is_run:
        raise UserError(f"{repo_id} holds a model of type {theirs}, and this one is {prepared.model_type}: {remedy}")


def _model_type(api: HfApi, repo_id: str, commit: str | None) -> str:
    """What the config there says. Fetched plainly: a download would keep it, and hide what went wrong."""
    url = f"{api.endpoint}/{repo_id}/resolve/{commit}/{CONFIG_NAME}"
    response = get_session().get(url, headers=build_hf_headers(token=api.token))
    hf_raise_for_status(response)
    try:
        return str(response.json()["model_type"])
    except (ValueError, KeyError, TypeError):
        return "unknown"


def check_front_matter(api: HfApi, repository: Repository, prepared: Prepared, patience: Patience) -> None:
    """Let the Hub look at a new card's front matter before anything large is sent: only the Hub knows its licences.

    Raises:
        UserError: The Hub would refuse it; has the Hub's own words.
    """
    for file in prepared.files:
        if file.path == CARD_NAME and not is_same(file, repository.files.get(CARD_NAME)):
            content = file.source.read_text("utf-8")
            patience.call("look at the card", lambda content=content: _validate(api, content))


def check_license(api: HfApi, license: str, patience: Patience) -> None:
    """Ask the Hub whether it takes a licence, where there is no card yet.

    Raises:
        UserError: It does not; has the Hub's own words.
    """
    patience.call("look at the licence", lambda: _validate(api, f"---\nlicense: {json.dumps(license)}\n---\n"))


def _validate(api: HfApi, card: str) -> None:
    url, headers = f"{api.endpoint}/api/validate-yaml", build_hf_headers(token=api.token)
    response = get_session().post(url, json={"content": card, "repoType": "model"}, headers=headers)
    if response.status_code == 400:
        told = "; ".join(_complaints(response))
        raise UserError(
            f"the Hub would refuse the card ({told}); nothing was sent: the licences that it knows are at "
            f"{LICENSES_PAGE}"
        )
    hf_raise_for_status(response)


def _complaints(response: httpx2.Response) -> list[str]:
    try:
        return [" ".join(str(error["message"]).split()) for error in response.json()["errors"]]
    except (ValueError, KeyError, TypeError):
        return ["it does not say why"]
