"""What went wrong because of something the user gave, as one line: what, where, remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError


class UserError(ValueError):
    """A mistake in what the user gave; the command line prints it in one line and exits with 2."""


@contextmanager
def as_user_error(where: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn a ValueError of a lower floor, which knows no recipe, into a UserError that says where the value came from.

    Args:
        where: Prefix of the message, such as "recipe, section model".
        kind: Class of the error that is raised.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Config validation wraps the reason in a headline of its own; the reason is the last line.
        reason = lines[-1].removeprefix("TypeError: ") if lines else type(error).__name__
        raise kind(f"{where}: {reason}") from error
