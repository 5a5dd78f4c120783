"""Counts of things as a person writes them: "1 process", "2,048 files", "3.70 MB"."""


def counted(count: int, thing: str, plural: str | None = None) -> str:
    """A number and what it counts.

    Args:
        count: How many.
        thing: The name of one.
        plural: The name of several; one with an s if not given.
    """
    return f"{count:,} {thing if count == 1 else plural or thing + 's'}"


def megabytes(num_bytes: int) -> str:
    """Text in megabytes of 10^6 bytes, to two places; what would come out as 0.00 MB in bytes."""
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes >= 5_000 else counted(num_bytes, "byte")
