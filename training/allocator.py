"""Memory that is given back is kept at hand, instead of being fetched from the system again at every operator."""

import ctypes
import sys

# Names of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep what tensors on the CPU give back; for a process that trains.

    A step makes and drops some hundred tensors of megabytes. By default those beyond 32 MiB are mapped anew each time,
    smaller ones may be given back at the heap's end, and each first touch of a page is a fault: half the time of an
    operator that reads its input once. The process's resident memory then stays at its peak, which training comes
    back to in every step anyway.

    Returns:
        Whether it could be set; False where the C library is another than glibc, and nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        is_glibc, set_option = hasattr(libc, "gnu_get_libc_version"), libc.mallopt
    except (AttributeError, OSError):
        return False
    if not is_glibc:
        return False
    return bool(set_option(_M_MMAP_THRESHOLD, 1 << 30) and set_option(_M_TRIM_THRESHOLD, _LARGEST_INT))
