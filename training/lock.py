"""One run at a time in a folder."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tercet.training.errors import UserError

LOCK_NAME = ".tercet-lock"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; two runs in one would take each other's checkpoints for their own.

    The lock is the kernel's (flock) and ends with the process, however that ends: a file that a killed run has left
    behind locks nothing. On NFS it holds between machines where the mount passes locks on to the server, as Linux does
    by default; with the mount options `nolock` or `local_lock=flock` only between processes of one machine.

    Args:
        folder: Must be there. Removed at the end if nothing else is in it.

    Raises:
        UserError: Another process holds it; names the process and its machine. Or the file system keeps no locks.
    """
    descriptor = _locked(folder / LOCK_NAME)
    try:
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        # Still locked: whoever waits for this file sees that it has gone and takes another.
        (folder / LOCK_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


def _locked(path: Path) -> int:
    """A descriptor of the lock file at `path`, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"{path.parent} is in use by another run ({_holder(path)}): wait for it or stop it, "
                "or choose another output folder"
            ) from None
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise UserError(
                f"{path.parent}: its file system keeps no locks ({error.strerror}), so a second run in it would "
                "not be noticed: choose an output folder on another file system, or mount this one with locks"
            ) from error
        # The one before may have removed the file between our opening and our locking of it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not yet written its number"
