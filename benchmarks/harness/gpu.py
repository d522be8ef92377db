"""The command line of a benchmark on one GPU. It needs only torch."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from .report import Section, finish, measure


def run(stem: str, doc: str | None, title: str, note: str, sections: Callable[[str], Mapping[str, Section]]) -> int:
    """Run the benchmark, write `stem`.json and `stem`.md, and return the exit status.

    `sections` returns the sections for a device.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"directory for {stem}.json and {stem}.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=sorted(sections("cpu")), help="run only these sections")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    available = sections(options.device)
    rows = measure(
        {name: available[name] for name in options.only or available}, writes_results=options.out is not None
    )
    return finish(rows, title, note, options.out and options.out / stem, fail=not options.no_fail)
