"""`zeroshard plan`: will it fit, on how many ranks, and what does the network pay?"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import CheckpointError
from ..planner.sources import freeze_params, load_model_shape
from ..planner.request import OptimizerChoice, PlanRequest, make_config, make_network, parse_options
from ..planner.pictures import write_page
from ..planner.plan_picture import draw_plan
from ..planner.plan_quantities import parse_bytes, parse_ranks
from .plan import print_plan
from .show import replace_unprintable

_TABLE_WIDTH = 160
"""Of tables that are not shown in a terminal."""
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
    shard_group_size: Annotated[int | None, typer.Option(help="ranks of a row that shares the state: 8")] = None,
    bandwidth_within: Annotated[str | None, typer.Option(help="what a rank sends inside such a row: 450GB/s")] = None,
    peer_checkpoint: Annotated[bool, typer.Option("--peer-checkpoint", help="with PeerCheckpoint()")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="with CPUOffload()")] = False,
    bucket: Annotated[str | None, typer.Option(help="of FlatShards(): 128MiB")] = None,
    reduce: Annotated[str | None, typer.Option(help="what gradients travel in: bf16")] = None,
    frozen: Annotated[list[str] | None, typer.Option(help="parameters that do not train: 'embed*'; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and seconds")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw it: plan.png")] = None,
    html: Annotated[Path | None, typer.Option(help="a page to explore it in a browser: plan.html")] = None,
) -> None:
    """Say how much memory a rank needs, by part, and what travels, before anything is allocated or trained."""
    with _exit_on_usage_error():
        wish = PlanRequest(
            freeze_params(load_model_shape(model), frozen or ()),
            parse_ranks(ranks),
            make_config(peer_checkpoint=peer_checkpoint, offload=offload, bucket=bucket, reduce=reduce),
            None if memory is None else parse_bytes("--memory", memory),
            parse_bytes("--activations", activations),
            make_network(bandwidth, latency, bandwidth_within),
            shard_group_size,
        )
        asked = OptimizerChoice(optimizer, parse_options(options))
        _output_plan(wish, asked, precision, as_json=as_json, picture=picture, html=html)


def _output_plan(
    request: PlanRequest,
    optimizer: OptimizerChoice,
    precision: str | None,
    *,
    as_json: bool,
    picture: Path | None,
    html: Path | None,
) -> None:
    found = request.make_plan(optimizer, precision)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        print_plan(found, Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH))
    drawn = None if picture is None else draw_plan(found, picture)
    if html is not None:
        with Console(stderr=True).status("The page has numbers for many choices: half a minute"):
            write_page(request, optimizer, precision, html)
    for file in filter(None, (drawn, html)):
        typer.echo(f"Written: {replace_unprintable(str(file))}", err=True)


@contextmanager
def _exit_on_usage_error() -> Iterator[None]:
    """What is wrong with a word of the command line ends it as a wrong option does."""
    try:
        yield
    except CheckpointError:
        raise  # of a file
    except (ValueError, TypeError) as error:  # also those that an optimizer raises for its options
        typer.echo(f"Error: {replace_unprintable(str(error))}", err=True)
        raise typer.Exit(2) from None
