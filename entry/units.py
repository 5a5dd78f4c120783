"""Sizes and counts as a table shows them: three figures and a unit."""


def binary_bytes(size: int) -> str:
    """Bytes in powers of 1024, as memory is counted: 1536 → "1.50 KiB"."""
    value, unit = _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))
    return f"{value:.{0 if unit == ' B' or value >= 100 else 2}f}{unit}"


def decimal_bytes(size: int) -> str:
    """Bytes in powers of 1000, as the Hub counts files: 1536 → "1.5 kB"."""
    value, unit = _scaled(size, 1000, (" B", " kB", " MB", " GB", " TB"))
    return f"{value:.{0 if unit == ' B' else 1}f}{unit}"


def decimal_count(count: int) -> str:
    """A count in thousands, millions, billions: 1_500_000 → "1.50 M"."""
    value, unit = _scaled(count, 1000, ("", " K", " M", " G", " T"))
    return f"{value:.{2 if unit else 0}f}{unit}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The value in the largest unit that leaves it at least 1, and that unit."""
    for unit in units[:-1]:
        if value < base:
            return value, unit
        value /= base
    return value, units[-1]
