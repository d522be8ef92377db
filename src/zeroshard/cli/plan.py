"""`zeroshard plan`: the command, and a plan as a table for terminals."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .._formatting import format_bytes, format_count, format_seconds, format_table, replace_unprintable
from ..errors import CheckpointError
from ..planner.estimate import Estimate
from ..planner.pictures import MEMORY_COLOURS, display_unit, draw_plan, write_page
from ..planner.plan import Plan
from ..planner.request import (
    OptimizerChoice,
    PlanRequest,
    make_config,
    make_network,
    parse_bytes,
    parse_options,
    parse_ranks,
)
from ..planner.shapes import load_model_shape

_BAR_COLUMNS = 24
_MEMORY_COLUMNS = {"params": "parameters", "grads": "gradients", "state": "state", "masters": "masters"}
_MEMORY_COLUMNS |= {"total": "total", "buffers": "buffers", "activ.": "activations", "peak": "peak"}
"""Headings, and the attributes of `MemoryEstimate`."""
_OPTIONAL_COLUMNS = ("masters", "activ.", "host", "fits")
"""Columns that are left out if they are empty."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print a table with one section per number of ranks and one row per method, and explain it.

    If the terminal is too narrow, the columns are divided into several tables. In a wide one, rows end with bars.
    """
    console.print(Text.assemble((replace_unprintable(plan.model.name), "bold"), f": {plan.headline}"))
    console.print(Text(f"{display_unit(plan)[0]} on the rank with the most memory in use", style="italic"))
    columns = _make_columns(plan)
    has_bars = _width(columns) + _BAR_COLUMNS + 3 <= console.width
    for table in _divide_columns(columns, console.width):
        _print_table(plan, table, console, has_bars=has_bars)
    if has_bars:
        drawn = {part for estimate in plan for part, nbytes in estimate.memory.breakdown.items() if nbytes}
        legend = [Text.assemble(("█ ", colour), part) for part, colour in MEMORY_COLOURS.items() if part in drawn]
        console.print(Text("   ").join(legend))
    for sentence in plan.explain():
        console.print(Text(sentence, style="bold" if sentence.startswith("With") else "dim"))


def _make_columns(plan: Plan) -> list[list[str]]:
    """Return columns of text, each with its heading. Rows are the estimates, in the order of the plan."""
    _, unit = display_unit(plan)

    def format_in_unit(nbytes: int) -> str:
        if 0 < nbytes < 0.01 * unit:
            return "<0.01"
        return f"{nbytes / unit:,.1f}" if nbytes >= 99.95 * unit else f"{nbytes / unit:.2f}"

    def make_cells(estimate: Estimate) -> dict[str, str]:
        memory = estimate.memory
        return {
            "method": f"  {estimate.method}",
            **{name: format_in_unit(getattr(memory, field)) for name, field in _MEMORY_COLUMNS.items()},
            "in": memory.peak_phase,
            "host": format_in_unit(memory.host),
            "balance": f"{estimate.state_imbalance:.2f}",
            "sent": format_bytes(estimate.traffic.sent),
            "network": format_seconds(estimate.traffic.seconds),
            "fits": {None: "", True: "yes", False: "no"}[plan.fits(estimate)],
        }

    rows = [make_cells(estimate) for estimate in plan]
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    return [column for column in columns if column[0] not in _OPTIONAL_COLUMNS or {*column[1:]} - {"", "0.00"}]


def _divide_columns(columns: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Divide columns into tables that fit into `width`, memory first. Each one starts with the methods."""
    methods, *others = columns
    num_memory = [column[0] for column in others].index("in") + 1
    while others:
        count = len(others) if _width([methods, *others]) <= width else min(num_memory, len(others))
        while count > 1 and _width([methods, *others[:count]]) > width:
            count -= 1
        yield [methods, *others[:count]]
        others, num_memory = others[count:], num_memory - count if num_memory > count else len(others)


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in columns) - 2


def _print_table(plan: Plan, columns: list[list[str]], console: Console, *, has_bars: bool) -> None:
    alignment = "".join("<" if column[0] in ("method", "in") else ">" for column in columns)
    heading, *lines = format_table(list(zip(*columns, strict=True)), alignment)
    width = _width(columns)
    bar_heading = f"  of {format_bytes(_bar_scale(plan))}" if has_bars else ""
    console.print(Text(f"\n{heading:{width}}{bar_heading}", style="bold"))
    for ranks in plan.rank_counts:
        console.print(Text(format_count(ranks, "rank"), style="bold cyan"))
        for estimate, line in zip(plan, lines, strict=True):
            if estimate.ranks == ranks:
                row = Text(f"{line:{width}}" if has_bars else line)
                row.highlight_regex(r" yes *$", "bold green")
                row.highlight_regex(r" no *$", "red")
                console.print(row.append(_draw_bar(plan, estimate) if has_bars else ""))


def _bar_scale(plan: Plan) -> int:
    return max(1, plan.memory or max(estimate.memory.peak for estimate in plan))


def _draw_bar(plan: Plan, estimate: Estimate) -> Text:
    """Draw the peak by category, scaled to the memory. A longer bar ends in an arrow."""
    bar, total, drawn = Text("  "), 0, 0
    for name, nbytes in estimate.memory.breakdown.items():
        total += nbytes
        end = min(_BAR_COLUMNS, round(total * _BAR_COLUMNS / _bar_scale(plan)))
        bar.append("█" * (end - drawn), style=MEMORY_COLOURS[name])
        drawn = max(drawn, end)
    bar.append("·" * (_BAR_COLUMNS - drawn), style="dim")
    return bar.append("▶" if estimate.memory.peak > _bar_scale(plan) else "", style="red")


# ---------------------------------------------------------------------------------------------------------------------
# The command.


_TABLE_WIDTH = 160
"""Width of tables that are not printed to a terminal."""
_MODEL_HELP = (
    "package.module:callable or file.py:callable that returns a module; a Transformers config.json or its directory; a "
    ".safetensors file or its index; a name such as gpt2-xl or llama-3-8b; or a number such as 7.5B"
)
_PRECISION_HELP = (
    "fp32, bf16 or fp16; bf16+fp32 with master weights in fp32; bf16-autocast with parameters in fp32. Default: the "
    "model's dtypes"
)


def plan(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    optimizer: Annotated[
        str, typer.Option(help="class of torch.optim, package.module:Class, file.py:Class, or muon+adamw")
    ] = "AdamW",
    options: Annotated[str | None, typer.Option(help="optimizer arguments: lr=1e-3,momentum=0.9")] = None,
    precision: Annotated[str | None, typer.Option(help=_PRECISION_HELP)] = None,
    ranks: Annotated[str, typer.Option(help="world sizes: 8,64,512; 1-4096 for powers of two")] = "1,8,64,512",
    memory: Annotated[str | None, typer.Option(help="memory of a GPU: 80GB, 80GiB")] = None,
    activations: Annotated[str, typer.Option(help="activations per rank: 10GB")] = "0",
    bandwidth: Annotated[str, typer.Option(help="send bandwidth of a rank: 50GB/s, 400Gbit/s")] = "50GB/s",
    latency: Annotated[str, typer.Option(help="latency of a message: 10us")] = "10us",
    shard_group_size: Annotated[int | None, typer.Option(help="ranks per shard group: 8")] = None,
    bandwidth_within: Annotated[
        str | None, typer.Option(help="send bandwidth of a rank inside a shard group: 450GB/s")
    ] = None,
    peer_checkpoint: Annotated[bool, typer.Option("--peer-checkpoint", help="use PeerCheckpoint()")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="use CPUOffload()")] = False,
    bucket: Annotated[str | None, typer.Option(help="bucket size: 128MiB")] = None,
    reduce: Annotated[str | None, typer.Option(help="dtype in which gradients are sent: bf16")] = None,
    frozen: Annotated[list[str] | None, typer.Option(help="frozen parameters: 'embed*'; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and seconds")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw a picture: plan.png")] = None,
    html: Annotated[Path | None, typer.Option(help="write an interactive page: plan.html")] = None,
) -> None:
    """Estimate per-rank memory and communication volume without allocating anything."""
    with _exit_on_usage_error():
        request = PlanRequest(
            load_model_shape(model).freeze(frozen or ()),
            parse_ranks(ranks),
            make_config(peer_checkpoint=peer_checkpoint, offload=offload, bucket=bucket, reduce=reduce),
            None if memory is None else parse_bytes("--memory", memory),
            parse_bytes("--activations", activations),
            make_network(bandwidth, latency, bandwidth_within),
            shard_group_size,
        )
        choice = OptimizerChoice(optimizer, parse_options(options))
        planned = request.make_plan(choice, precision)
        if as_json:
            typer.echo(json.dumps(planned.as_dict(), indent=2))
        else:
            print_plan(planned, Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH))
        drawn = None if picture is None else draw_plan(planned, picture)
        if html is not None:
            with Console(stderr=True).status("Computing the page, which takes about half a minute"):
                write_page(request, choice, precision, html)
        for file in filter(None, (drawn, html)):
            typer.echo(f"Written: {replace_unprintable(str(file))}", err=True)


@contextmanager
def _exit_on_usage_error() -> Iterator[None]:
    """Report an invalid argument like a wrong option: one line and exit status 2."""
    try:
        yield
    except CheckpointError:
        raise  # concerns a file, not the usage
    except (ValueError, TypeError) as error:  # including those of an optimizer that rejects its options
        typer.echo(f"Error: {replace_unprintable(str(error))}", err=True)
        raise typer.Exit(2) from None
