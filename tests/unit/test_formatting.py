"""Text for messages, reports and the command line."""

from __future__ import annotations

from zeroshard._formatting import format_bytes, format_count, format_names, format_ranks, format_seconds, format_table


def test_format_bytes() -> None:
    sizes = (0, 999, 1500, 80e9, 31_412_000_000, 1.5e15)
    assert [format_bytes(nbytes) for nbytes in sizes] == ["0 B", "999 B", "1.5 kB", "80 GB", "31.4 GB", "1,500 TB"]
    binary_sizes = (1023, 1536, 25 << 20, 80 << 30)
    assert [format_bytes(nbytes, binary=True) for nbytes in binary_sizes] == ["1,023 B", "1.5 KiB", "25 MiB", "80 GiB"]


def test_format_seconds() -> None:
    times = (0, 2.0, 0.0125, 3e-6, 4e-9)
    assert [format_seconds(seconds) for seconds in times] == ["0", "2 s", "12.5 ms", "3 us", "4 ns"]


def test_format_names_ranks_and_counts() -> None:
    assert format_names(["a", "b"], 2) == "a, b"
    assert format_names(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert (format_ranks([3]), format_ranks(range(10))) == ("rank 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7, ...")
    assert (format_count(1, "rank"), format_count(1024, "rank")) == ("1 rank", "1,024 ranks")


def test_format_table() -> None:
    rows = [("name", "size", "note"), ("a", "1", ""), ("long name", "1,000", "x")]
    assert format_table(rows, "<>") == ["name        size  note", "a              1", "long name  1,000  x"]
