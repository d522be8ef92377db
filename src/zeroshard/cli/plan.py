"""`zeroshard plan`: the command, and a plan as a table for terminals."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._types import replace_unprintable
from ..errors import CheckpointError
from ..planner.estimate import Estimate
from ..planner.pictures import (
    MEMORY_COLOURS,
    PHASE_LABELS,
    breakdown_at_peak,
    display_unit,
    draw_plan,
    format_exclusions,
    format_headline,
    format_min_ranks,
    format_network_assumptions,
    format_peer_checkpoint_traffic,
    write_page,
)
from ..planner.plan import Plan
from ..planner.request import (
    OptimizerChoice,
    PlanRequest,
    format_bytes,
    format_seconds,
    make_config,
    make_network,
    parse_bytes,
    parse_options,
    parse_ranks,
)
from ..planner.shapes import freeze_params, load_model_shape

_MIN_WIDE_COLUMNS = 140
"""Terminal width from which on the table has bars and long headings."""
_BAR_COLUMNS = 24


@dataclass(frozen=True)
class Column:
    """A column of the table. `narrow_heading` is used in narrow terminals."""

    heading: str
    narrow_heading: str
    cell: Callable[[Estimate], Text | str]
    justify: str = "right"


def print_plan(plan: Plan, console: Console) -> None:
    """Print the table with one section per number of ranks and one row per method, and explain it."""
    wide = console.width >= _MIN_WIDE_COLUMNS
    unit = display_unit(plan)
    console.print(
        Text.assemble((replace_unprintable(plan.model.name), "bold"), ": ", format_headline(plan)), soft_wrap=False
    )
    console.print(_plan_table(plan, unit, wide))
    if wide:
        console.print(_bar_legend(plan))
    for sentence in (
        format_min_ranks(plan),
        format_peer_checkpoint_traffic(plan),
        format_network_assumptions(plan),
        format_exclusions(plan),
    ):
        if sentence:
            console.print(Text(sentence, style="bold" if sentence.startswith("With") else "dim"))


def _plan_table(plan: Plan, unit: tuple[str, float], is_wide: bool) -> Table:
    columns = _plan_columns(plan, unit, is_wide)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1 if is_wide else 0), pad_edge=False, header_style="bold")
    table.title, table.title_justify = f"{unit[0]} on the rank that has most", "left"
    for column in columns:
        table.add_column(
            column.heading if is_wide else column.narrow_heading,
            justify="left" if column.justify == "left" else "right",
            no_wrap=True,
        )
    for ranks in sorted({estimate.ranks for estimate in plan}):
        title = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
        table.add_row(Text(title, style="bold cyan"), *[""] * (len(columns) - 1))
        for estimate in plan:
            if estimate.ranks == ranks:
                table.add_row(*(column.cell(estimate) for column in columns))
        table.add_section()
    return table


def _plan_columns(plan: Plan, unit: tuple[str, float], is_wide: bool) -> list[Column]:
    def memory_cell(name: str) -> Callable[[Estimate], str]:
        return lambda estimate: _format_in_unit(unit, getattr(estimate.memory, name))

    return [
        Column("method", "method", lambda estimate: f"  {estimate.method}", "left"),
        Column("parameters", "params", memory_cell("parameters")),
        Column("gradients", "grads", memory_cell("gradients")),
        Column("state", "state", memory_cell("state")),
        *([Column("masters", "masters", memory_cell("masters"))] if _has_memory(plan, "masters") else []),
        Column("total", "total", memory_cell("total")),
        Column("buffers", "buffers", memory_cell("buffers")),
        Column("peak", "peak", lambda estimate: Text(_format_in_unit(unit, estimate.memory.peak), style="bold")),
        Column("in", "in", lambda estimate: PHASE_LABELS[estimate.memory.peak_phase], "left"),
        *([Column(_bar_heading(plan), "", lambda estimate: _memory_bar(plan, estimate), "left")] if is_wide else []),
        *([Column("host", "host", memory_cell("host"))] if _has_memory(plan, "host") else []),
        Column("balance", "bal.", lambda estimate: f"{estimate.state_imbalance:.2f}"),
        Column("sent a step", "sent", lambda estimate: format_bytes(estimate.traffic.sent)),
        *([Column("network", "network", _network_cell)] if is_wide or not _has_memory(plan, "host") else []),
        *(
            [Column("fits", "fits", lambda estimate: _fits_cell(plan.fits(estimate)))]
            if plan.memory is not None
            else []
        ),
    ]


def _network_cell(estimate: Estimate) -> str:
    return format_seconds(estimate.traffic.seconds)


def _format_in_unit(unit: tuple[str, float], nbytes: int) -> str:
    value = nbytes / unit[1]
    if nbytes and value < 0.01:
        return "<0.01"
    return f"{value:,.1f}" if value >= 99.95 else f"{value:.2f}"


def _fits_cell(fits: bool | None) -> Text:
    return Text("yes", style="bold green") if fits else Text("no", style="red")


def _bar_scale_bytes(plan: Plan) -> int:
    return max(1, plan.memory or max(estimate.memory.peak for estimate in plan))


def _bar_heading(plan: Plan) -> str:
    return f"of {format_bytes(_bar_scale_bytes(plan))}"


def _memory_bar(plan: Plan, estimate: Estimate) -> Text:
    """Draw the peak by category, scaled to the memory. A longer bar ends in an arrow."""
    memory = {
        name: getattr(estimate.memory, name)
        for name in ("parameters", "gradients", "state", "masters", "activations", "peak")
    }
    bar, total, drawn = Text(), 0, 0
    for name, count in breakdown_at_peak(memory, estimate.memory.peak_phase).items():
        total += count
        end = min(_BAR_COLUMNS, round(total * _BAR_COLUMNS / _bar_scale_bytes(plan)))
        bar.append("█" * (end - drawn), style=MEMORY_COLOURS[name])
        drawn = max(drawn, end)
    bar.append("·" * (_BAR_COLUMNS - drawn), style="dim")
    return bar.append("▶" if estimate.memory.peak > _bar_scale_bytes(plan) else " ", style="red")


def _bar_legend(plan: Plan) -> Text:
    drawn = [
        name
        for name in MEMORY_COLOURS
        if name in ("parameters", "gradients", "state", "on top") or _has_memory(plan, name)
    ]
    return Text("   ").join(Text.assemble(("█ ", MEMORY_COLOURS[name]), name) for name in drawn)


def _has_memory(plan: Plan, name: str) -> bool:
    return any(getattr(estimate.memory, name) for estimate in plan)


# ---------------------------------------------------------------------------------------------------------------------
# The command.


_TABLE_WIDTH = 160
"""Width of tables that are not printed to a terminal."""
_MODEL_HELP = (
    "package.module:callable or file.py:callable that returns a module; a Transformers config.json or its directory; a "
    ".safetensors file or its index; a name such as gpt2-xl or llama-3-8b; or a number such as 7.5B"
)


def plan(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    optimizer: Annotated[
        str, typer.Option(help="of torch.optim, package.module:Class, file.py:Class, or muon+adamw")
    ] = "AdamW",
    options: Annotated[str | None, typer.Option(help="of the optimizer: lr=1e-3,momentum=0.9")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, bf16+fp32: with masters in fp32")] = None,
    ranks: Annotated[str, typer.Option(help="8,64,512; 1-4096 are powers of two")] = "1,8,64,512",
    memory: Annotated[str | None, typer.Option(help="of a GPU: 80GB, 80GiB")] = None,
    activations: Annotated[str, typer.Option(help="what they take on a rank: 10GB")] = "0",
    bandwidth: Annotated[str, typer.Option(help="what a rank sends: 50GB/s, 400Gbit/s")] = "50GB/s",
    latency: Annotated[str, typer.Option(help="of a message: 10us")] = "10us",
    shard_group_size: Annotated[int | None, typer.Option(help="ranks per shard group: 8")] = None,
    bandwidth_within: Annotated[
        str | None, typer.Option(help="what a rank sends inside a shard group: 450GB/s")
    ] = None,
    peer_checkpoint: Annotated[bool, typer.Option("--peer-checkpoint", help="with PeerCheckpoint()")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="with CPUOffload()")] = False,
    bucket: Annotated[str | None, typer.Option(help="of FlatShards(): 128MiB")] = None,
    reduce: Annotated[str | None, typer.Option(help="what gradients travel in: bf16")] = None,
    frozen: Annotated[list[str] | None, typer.Option(help="parameters that do not train: 'embed*'; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and seconds")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw it: plan.png")] = None,
    html: Annotated[Path | None, typer.Option(help="a page to explore it in a browser: plan.html")] = None,
) -> None:
    """Estimate per-rank memory and communication volume without allocating anything."""
    with _exit_on_usage_error():
        request = PlanRequest(
            freeze_params(load_model_shape(model), frozen or ()),
            parse_ranks(ranks),
            make_config(peer_checkpoint=peer_checkpoint, offload=offload, bucket=bucket, reduce=reduce),
            None if memory is None else parse_bytes("--memory", memory),
            parse_bytes("--activations", activations),
            make_network(bandwidth, latency, bandwidth_within),
            shard_group_size,
        )
        choice = OptimizerChoice(optimizer, parse_options(options))
        _output_plan(request, choice, precision, as_json=as_json, picture=picture, html=html)


def _output_plan(
    request: PlanRequest,
    optimizer: OptimizerChoice,
    precision: str | None,
    *,
    as_json: bool,
    picture: Path | None,
    html: Path | None,
) -> None:
    plan = request.make_plan(optimizer, precision)
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=2))
    else:
        print_plan(plan, Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH))
    drawn = None if picture is None else draw_plan(plan, picture)
    if html is not None:
        with Console(stderr=True).status("The page has numbers for many choices: half a minute"):
            write_page(request, optimizer, precision, html)
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
