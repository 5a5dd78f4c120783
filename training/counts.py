"""Counts of things as a person writes them: "1 process", "2,048 files"."""


def counted(count: int, thing: str, plural: str | None = None) -> str:
    """A number and what it counts.

    Args:
        count: How many.
        thing: The name of one.
        plural: The name of several; one with an s if not given.
    """
    return f"{count:,} {thing if count == 1 else plural or thing + 's'}"
