"""What the Hub answers when it refuses: a status, a code that its clients turn into an exception, one sentence."""


class HubError(Exception):
    """A refusal.

    Attributes:
        status: HTTP status.
        message: The sentence, sent as X-Error-Message and as the body's "error".
        code: X-Error-Code, by which huggingface_hub chooses the class of the exception; None leaves it to the status.
        headers: Further headers.
        body: Body instead of {"error": message}.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        body: object = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}
        self.body = body


def repository_not_found(is_signed_in: bool) -> HubError:
    """Missing, or not for this caller's eyes: the Hub doesn't say which.

    It answers 401 to a caller without a token. Its clients know that case by the https address of the Hub; for an
    address of http they need the code, which is therefore always sent.
    """
    if is_signed_in:
        return HubError(404, "There is no such repository", "RepoNotFound")
    return HubError(401, "Sign in to see whether there is such a repository", "RepoNotFound")


def revision_not_found(revision: str) -> HubError:
    return HubError(404, f"There is no revision {revision}", "RevisionNotFound")


def entry_not_found(path: str, commit: str) -> HubError:
    return HubError(404, f"There is no entry {path}", "EntryNotFound", {"X-Repo-Commit": commit})
