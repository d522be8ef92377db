"""The `zeroshard` command line application. Needs the extra `zeroshard[cli]`."""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from .._formatting import replace_unprintable
from ..checkpoint.progress import Progress, errors_as_checkpoint_error
from ..doctor.report import main as run_doctor
from ..errors import ZeroError
from ..torch_patch import run_command
from .checkpoint import convert_checkpoint, describe_checkpoint, infer_format, print_description
from .plan import plan

_TABLE_WIDTH = 160
"""Width of tables that are not printed to a terminal."""


class TargetFormat(str, Enum):
    """Choices of `convert --to`."""

    torch = "torch"
    dcp = "dcp"
    safetensors = "safetensors"


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
checkpoints = typer.Typer(no_args_is_help=True, help="Inspect and convert checkpoints.")
app.add_typer(checkpoints, name="checkpoint")


@app.callback()
def global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version of zeroshard.")] = False,
) -> None:
    """Plan memory and traffic, inspect and convert checkpoints, diagnose jobs, run scripts."""
    del version  # handled in __main__, which works without the extra


@checkpoints.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a checkpoint, or a folder of checkpoints (the latest is used)")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print a summary and the contents of a checkpoint. Only its metadata and the sizes of its files are read."""
    with errors_as_checkpoint_error(f"{path} cannot be read"):
        description = describe_checkpoint(path)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        print_description(description, Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH))


@checkpoints.command()
def convert(
    source: Annotated[Path, typer.Argument(help="a checkpoint, a folder of checkpoints, or a torch.save file")],
    target: Annotated[Path, typer.Argument(help="the file or directory to write, which must not exist")],
    to: Annotated[
        TargetFormat | None,
        typer.Option(
            "--to", help="default: by the suffix of TARGET (.pt and .pth: torch, .safetensors, no suffix: dcp)"
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="write only the model, as model.load_state_dict takes it")
    ] = False,
) -> None:
    """Write a checkpoint in another format, a few MiB at a time. TARGET appears when it is complete."""
    target_format = infer_format(target) if to is None else to.value
    with _progress_bar(target_format) as progress:
        result = convert_checkpoint(source, target, target_format, progress, weights_only=weights_only)
    typer.echo(replace_unprintable(result))


_PASSTHROUGH_SETTINGS: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}
"""Settings of commands that parse their own arguments."""


@app.command(context_settings=_PASSTHROUGH_SETTINGS, add_help_option=False)
def run(context: typer.Context) -> None:
    """Run a script as python does, with zeroshard's classes in place of torch's. See `run --help`."""
    raise SystemExit(run_command(context.args))


@app.command(context_settings=_PASSTHROUGH_SETTINGS, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Check whether a job is ready for training: `torchrun ... -m zeroshard doctor`. See `doctor --help`."""
    raise SystemExit(run_doctor(context.args))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit. `ZeroError` and `OSError` are printed as one line, without a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # not needed here
            app(args=None if arguments is None else list(arguments), prog_name="zeroshard")
    except (ZeroError, OSError) as error:
        typer.echo(f"Error: {replace_unprintable(str(error))}", err=True)
        raise SystemExit(1) from None


@contextmanager
def _progress_bar(label: str) -> Iterator[Progress]:
    """Show the bytes that were verified and written, if stderr is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console, last = Console(stderr=True), TimeRemainingColumn()
    with Bars(*columns, last, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(label, total=None)
        yield Progress(label, lambda done, total: bars.update(bar, completed=done, total=total), 0)
