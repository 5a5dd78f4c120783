"""A push in a process of its own, for a run that goes on meanwhile: one request in, one answer out.

The request is a line of JSON on standard input, which stays open as long as whoever asked is alive; the answer is a
line of JSON on standard output. `{"push": FOLDER, "options": {...}}` pushes a folder; `{"check": RECIPE, "options":
{...}}` sees whether a later push could work, and makes the repository.
"""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tercet.training.errors import UserError

_LOW_PRIORITY = 10


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_LOW_PRIORITY)  # a step of the training goes first
    # Libraries print; the answer has standard output for itself.
    answer_file, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(request)), file=answer_file, flush=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a request comes to. `error` says why it failed, `passes` that it may work later."""
    from huggingface_hub.utils import disable_progress_bars

    from tercet.hub.options import PushOptions
    from tercet.hub.retries import is_transient, use_bounded_waits

    disable_progress_bars()
    use_bounded_waits()
    options = PushOptions(**request["options"])
    try:
        return _check(request["check"], options) if "check" in request else _push(Path(request["push"]), options)
    except UserError as error:
        passes = error.__cause__ is not None and is_transient(error.__cause__)
        return {"error": str(error), "passes": passes}
    except Exception as error:  # whatever it is, the run must hear of it, and not die of it
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "passes": False}


def _push(folder: Path, options: Any) -> dict[str, Any]:
    from tercet.hub.push import push_checkpoint

    report = push_checkpoint(folder, options, say=_silent)
    return {"url": report.url, "commit": report.commit, "tags": report.tags, "duration_s": report.duration_s}


def _check(recipe: str, options: Any) -> dict[str, Any]:
    """Refuse early what every push would be refused for."""
    from huggingface_hub import HfApi, get_token

    from tercet.hub.inspection import inspect, refuse, shorten_paths
    from tercet.hub.options import check_names
    from tercet.hub.preparation import Prepared, declared_license
    from tercet.hub.repository import check_license, check_may_push, read_repository
    from tercet.hub.retries import Patience, check_online, one_line_errors
    from tercet.hub.selection import RECIPE_NAME, published_files

    check_names(options)
    token = check_online(get_token())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / RECIPE_NAME).write_text(recipe, encoding="utf-8")
        license = declared_license(folder, options)
        if options.shorten_paths:
            shorten_paths(folder)
        refuse(inspect(published_files(folder), allow=options.allow, token=token), options)
    api, patience = HfApi(token=token), Patience(_silent, max_retries=1)
    nothing = Prepared([], "", (), "tercet", True, [])
    with one_line_errors(options, endpoint=str(api.endpoint)):
        if license is not None:
            check_license(api, license, patience)
        # Writes nothing where it is there already, and tells whether this token may write.
        api.create_repo(options.repo_id, private=options.private, exist_ok=True)
        repository = read_repository(api, options, patience)
        check_may_push(api, repository, nothing, options, patience)
    return {"url": f"{api.endpoint}/{options.repo_id}", "private": repository.private}


def _end_with_parent() -> None:
    """End at once when whoever asked has ended, however that came about."""
    sys.stdin.read()
    os._exit(1)


def _silent(line: str) -> None:
    """Nobody reads along."""


if __name__ == "__main__":
    main()
