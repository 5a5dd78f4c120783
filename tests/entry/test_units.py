"""Sizes and counts as people read them."""

from tercet.units import binary_bytes, decimal_bytes, decimal_count


def test_memory_in_powers_of_1024() -> None:
    shown = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 512_000: "500 KiB", 1_048_000: "1023 KiB", 5 << 30: "5.00 GiB"}
    assert {size: binary_bytes(size) for size in shown} == shown
    assert binary_bytes(3 << 50) == "3072 TiB"


def test_files_in_powers_of_1000() -> None:
    shown = {999: "999 B", 1536: "1.5 kB", 93_000_000: "93.0 MB", 1_700_000_000: "1.7 GB"}
    assert {size: decimal_bytes(size) for size in shown} == shown


def test_counts() -> None:
    shown = {999: "999", 1500: "1.50 K", 2_500_000: "2.50 M", 7_000_000_000_000: "7.00 T"}
    assert {count: decimal_count(count) for count in shown} == shown
