"""Names on the Hub, checked before anything is sent: a repository, a branch, a tag."""

import re

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from tercet.training.errors import UserError

# What git forbids in the name of a branch or a tag (git help check-ref-format).
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^[-./]|[./]$|\.lock$|\.lock/|^@$")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_repository(name: str) -> str:
    """A repository's name, `user/name` or `organization/name`.

    Raises:
        UserError: It is none; says why.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = " ".join(str(error).split()).removesuffix(".")
        raise UserError(f"{name!r} is no name of a repository ({reason}): give user/name") from None
    if "/" not in name:
        raise UserError(f"{name!r} names no owner: give user/name, such as YOUR-NAME/{name}")
    return name


def check_reference(name: str, what: str) -> str:
    """The name of a branch or a tag.

    Args:
        what: For the message, such as "branch".

    Raises:
        UserError: git, or the Hub, does not take it.
    """
    if not name or _FORBIDDEN.search(name) or name.startswith("refs/") or _COMMIT.fullmatch(name):
        raise UserError(
            f"{name!r} is no name for a {what}: use letters, digits, '-', '_', '.' and '/', such as step-1000"
        )
    return name
