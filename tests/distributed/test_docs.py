"""Every block of Python in README and docs runs, on two real ranks; commands are at least such that they could run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer.main
from torch import Tensor, nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import zeroshard
from tests.support import RankContext, ranks
from tests.support.tools import ROOT, Command, blocks_of, commands_of, pages
from zeroshard.cli.app import app

BLOCKS = [block for page in pages() for block in blocks_of(page)]
PAGES_RUN = sorted({block.page for block in BLOCKS if block.is_run})
BLOCKS_NOT_RUN = {
    ("docs/from-deepspeed.md", "DeepSpeed is no part of the tests' environment"),
    ("CONTRIBUTING.md", "a sketch of a test"),
}
"""All blocks that are not run, and why: none may be added in passing."""
LANGUAGES = {"python", "diff", "console", "bash", "text", "json"}
PAGES_WITH_DRAWINGS = {"ARCHITECTURE.md"}
"""Blocks without a language there are drawings."""


class SmallModel(nn.Module):
    """A small model with the parts that pages speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.embed(inputs)))
        return result


class BatchLoader:
    """Eight batches, in the dtype of the model."""

    position = 0

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(8):
            batch = torch.randn(4, 8, generator=draw).to(next(self._model.parameters()).dtype)
            yield batch, batch.square().mean(1, keepdim=True)


def make_model(*_: Any) -> nn.Module:
    torch.manual_seed(0)
    return SmallModel()


class PageNamespace(dict[str, Any]):
    """The names of a page. What it uses without defining it is there, or is made when it is first read; what is in
    `zeroshard` it must import, or call by that name."""

    def __init__(self) -> None:
        super().__init__({"torch": torch, "nn": nn, "dist": dist, "zeroshard": zeroshard, "nullcontext": nullcontext})
        self |= {"DistributedDataParallel": DistributedDataParallel, "device": torch.device("cpu"), "GPT": make_model}
        self |= {
            "loss_function": nn.functional.mse_loss,
            "train_one_step": lambda *_: None,
            "main": lambda: None,
            "STEPS": 1000,
        }

    def __missing__(self, name: str) -> Any:
        self[name] = made = _FACTORIES[name](self)
        return made


_FACTORIES: dict[str, Callable[[PageNamespace], Any]] = {
    "model": lambda _: make_model(),
    "ddp": lambda names: DistributedDataParallel(names["model"]),
    "optimizer": lambda names: zeroshard.shard(names["model"], torch.optim.AdamW, lr=1e-2),
    "scheduler": lambda names: LambdaLR(names["optimizer"], lambda _: 1.0),
    "loader": lambda names: BatchLoader(names["model"]),
}


@pytest.mark.parametrize("page", PAGES_RUN)
@ranks(2)
def test_code_blocks_of_each_page_run_in_order(ctx: RankContext, page: str, tmp_path: Path) -> None:
    names = PageNamespace()
    with simulate_torchrun(ctx, tmp_path):
        for block in filter(lambda it: it.is_run, blocks_of(page)):
            names = PageNamespace() if block.begins_anew else names
            exec(compile("\n" * block.line + block.code, page, "exec"), names)
            dist.barrier()


@contextmanager
def simulate_torchrun(ctx: RankContext, directory: Path) -> Iterator[None]:
    """With its settings, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(ctx.rank))
        patch.setenv("LOCAL_WORLD_SIZE", str(ctx.world_size))
        patch.chdir(directory)
        yield


def test_main_pages_contain_runnable_blocks() -> None:
    assert {"README.md", "docs/index.md", "docs/choosing.md", "docs/checkpoints.md"} <= set(PAGES_RUN)
    assert sum(block.is_run for block in BLOCKS) > 20


def test_skipped_blocks_are_listed_with_a_reason() -> None:
    assert {(block.page, block.reason) for block in BLOCKS if block.reason} == BLOCKS_NOT_RUN
    for block in BLOCKS:
        assert not block.mark or block.begins_anew or block.example or block.reason, f"{block}: {block.mark!r}"


def test_example_excerpts_match_their_files() -> None:
    shown = [block for block in BLOCKS if block.example]
    names = ("train_sharded", "recover", "lightning_gpt", "transformers_trainer", "accelerate_loop")
    assert {block.example for block in shown} == {f"examples/{name}.py" for name in names}
    for block in shown:
        assert block.text in (ROOT / str(block.example)).read_text(encoding="utf-8"), str(block)


def test_every_block_declares_its_language() -> None:
    """So that none is left out by mistake."""
    for block in BLOCKS:
        assert block.language in LANGUAGES or block.page in PAGES_WITH_DRAWINGS, f"{block}: {block.language!r}"


COMMANDS = [command for block in BLOCKS if block.language in ("console", "bash") for command in commands_of(block)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda it: f"{it.block} {' '.join(it.words)[:40]}")
def test_shell_commands_are_valid(command: Command) -> None:
    tool, *words = command.words
    assert tool in COMMAND_CHECKS, (
        f"nothing is known of the command {tool}: check what can be checked of it, in {__file__}"
    )
    COMMAND_CHECKS[tool](words)


def check_make(args: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in args:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def check_pip(args: list[str]) -> None:
    """Extras that are named are there."""
    assert args.pop(0) == "install"
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    for name in (name for word in args for names in re.findall(r"\[(.*)\]", word) for name in names.split(",")):
        assert re.search(rf"^{name} = \[", extras, re.MULTILINE), name


def check_script(args: list[str]) -> None:
    """The script is there, and knows the options that are given."""
    if args[0] == "-m":
        check_module(args[1:])
        return
    script = ROOT / args[0]
    assert script.is_file(), script
    text = script.read_text(encoding="utf-8")
    for option in (word for word in args[1:] if word.startswith("--")):
        assert option in text or "benchmarks" in args[0], f"{args[0]} has no {option}"


def check_module(args: list[str]) -> None:
    """Ours has commands; of others nothing is known."""
    if args[0] == "zeroshard":
        check_zeroshard(args[1:])


def check_torchrun(args: list[str]) -> None:
    options = get_args_parser().parse_args(args)
    if options.module:
        check_module([options.training_script, *options.training_script_args])
        return
    assert (ROOT / options.training_script).is_file(), options.training_script
    check_script([options.training_script, *options.training_script_args])


def check_zeroshard(args: list[str]) -> None:
    """Arguments and options are those of the command; nothing is run."""
    commands: Any = typer.main.get_command(app)
    commands.commands[args[0]].make_context(args[0], args[1:])


COMMAND_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "python": check_script,
    "python3": check_script,
    ".venv/bin/python": check_script,
    "torchrun": check_torchrun,
    "zeroshard": check_zeroshard,
}
