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
from ..planning.sources import freeze, model_shape
from .plan_options import Optimizer, Wish, config_of, network_of, options_in
from .plan_page import write_page
from .plan_picture import draw
from .plan_quantities import bytes_in, ranks_in
from .plan_table import show_plan
from .show import printable

_WIDTH = 160
"""Of tables that are not shown in a terminal."""
_MODEL = (
    "package.module:callable or file.py:callable that returns a module; a Transformers config.json or its directory; a "
    ".safetensors file or its index; a name such as gpt2-xl or llama-3-8b; or a number such as 7.5B"
)


def plan(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
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
    shard_within: Annotated[int | None, typer.Option(help="ranks of a row that shares the state: 8")] = None,
    bandwidth_within: Annotated[str | None, typer.Option(help="what a rank sends inside such a row: 450GB/s")] = None,
    second_copy: Annotated[bool, typer.Option("--second-copy", help="with SecondCopy()")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="with Offload()")] = False,
    bucket: Annotated[str | None, typer.Option(help="of FlatShards(): 128MiB")] = None,
    reduce: Annotated[str | None, typer.Option(help="what gradients travel in: bf16")] = None,
    frozen: Annotated[list[str] | None, typer.Option(help="parameters that do not train: 'embed*'; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes and seconds")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw it: plan.png")] = None,
    html: Annotated[Path | None, typer.Option(help="a page to explore it in a browser: plan.html")] = None,
) -> None:
    """Say how much memory a rank needs, by part, and what travels, before anything is allocated or trained."""
    with _usage_errors():
        wish = Wish(
            freeze(model_shape(model), frozen or ()),
            ranks_in(ranks),
            config_of(second_copy=second_copy, offload=offload, bucket=bucket, reduce=reduce),
            None if memory is None else bytes_in("--memory", memory),
            bytes_in("--activations", activations),
            network_of(bandwidth, latency, bandwidth_within),
            shard_within,
        )
        asked = Optimizer(optimizer, options_in(options))
        _answer(wish, asked, precision, as_json=as_json, picture=picture, html=html)


def _answer(
    wish: Wish, optimizer: Optimizer, precision: str | None, *, as_json: bool, picture: Path | None, html: Path | None
) -> None:
    found = wish.planned(optimizer, precision)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        show_plan(found, Console() if sys.stdout.isatty() else Console(width=_WIDTH))
    drawn = None if picture is None else draw(found, picture)
    if html is not None:
        with Console(stderr=True).status("The page has numbers for many choices: half a minute"):
            write_page(wish, optimizer, precision, html)
    for file in filter(None, (drawn, html)):
        typer.echo(f"Written: {printable(str(file))}", err=True)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What is wrong with a word of the command line ends it as a wrong option does."""
    try:
        yield
    except CheckpointError:
        raise  # of a file
    except (ValueError, TypeError) as error:  # also those that an optimizer raises for its options
        typer.echo(f"Error: {printable(str(error))}", err=True)
        raise typer.Exit(2) from None
