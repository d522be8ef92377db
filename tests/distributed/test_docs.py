"""Every Python block in README and docs runs on two real ranks; commands are checked without running them.

Diffs of whole scripts run under torchrun, before and after the change.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

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
from tests.support.launch import torchrun
from tests.support.tiers import sampled
from tests.support.tools import ROOT, Block, Command, blocks_of, commands_of, pages
from zeroshard.cli.app import app

BLOCKS = [block for page in pages() for block in blocks_of(page)]
PAGES_RUN = sorted({block.page for block in BLOCKS if block.is_run})
BLOCKS_NOT_RUN = {
    ("docs/from-deepspeed.md", "DeepSpeed is no part of the tests' environment"),
    ("docs/frameworks.md", "tests/integrations runs it on a checkpoint of Trainer"),
    ("CONTRIBUTING.md", "a sketch of a test"),
}
"""All blocks that are not run, and why: a new one needs an entry here."""
MIGRATIONS = ("ddp", "torch-zero", "fsdp2", "deepspeed")
LANGUAGES = {"python", "diff", "console", "bash", "text", "json"}
PAGES_WITH_DRAWINGS = {"ARCHITECTURE.md"}
"""On these pages, blocks without a language are drawings."""


class SmallModel(nn.Module):
    """A small model with the submodules that pages use."""

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
    """The namespace of a page. Names that pages use without defining them are predefined, or created on first use.
    Names of `zeroshard` must be imported, or used as `zeroshard.name`."""

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
        self[name] = value = _FACTORIES[name](self)
        return value


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
        for block in filter(lambda block: block.is_run, blocks_of(page)):
            names = PageNamespace() if block.has_new_namespace else names
            exec(compile("\n" * block.line + block.code, page, "exec"), names)
            dist.barrier()


@contextmanager
def simulate_torchrun(ctx: RankContext, directory: Path) -> Iterator[None]:
    """Set torchrun's environment variables, and change to a directory of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(ctx.rank))
        patch.setenv("LOCAL_WORLD_SIZE", str(ctx.world_size))
        patch.chdir(directory)
        yield


SCRIPTS = [block for block in BLOCKS if block.is_script]


@sampled("block", SCRIPTS, ids=str)
@pytest.mark.timeout(600)
def test_migrated_scripts_continue_the_run(block: Block, tmp_path: Path) -> None:
    """Both scripts, started from what the old one saved, come to the same loss."""
    sides = {"old": block.code if block.reason else block.old_code, "new": block.code}
    for side, code in sides.items():
        (tmp_path / f"{side}.py").write_text(code, encoding="utf-8")
    first, losses = tmp_path / "first", {}
    first.mkdir()
    start = run_script(tmp_path / "old.py", first)
    for side in sides:
        shutil.copytree(first, tmp_path / side)
        losses[side] = run_script(tmp_path / f"{side}.py", tmp_path / side)
    assert losses["new"] == pytest.approx(losses["old"], rel=1e-3)
    assert losses["new"] < 0.5 * start
    assert run_script(tmp_path / "new.py", tmp_path / "new") < 0.5 * start, "from its own checkpoint"


def run_script(script: Path, folder: Path) -> float:
    """Run a script on two ranks and return the loss that it prints."""
    printed = torchrun(script, 2, folder, warnings="default")
    return float(re.fullmatch(r"loss (\S+)\n", printed)[1])  # type: ignore[index]


def test_migration_pages_start_with_a_script() -> None:
    pages_with_scripts = [next(block for block in blocks_of(f"docs/from-{page}.md")) for page in MIGRATIONS]
    assert all(block.is_script for block in pages_with_scripts)


def test_main_pages_contain_runnable_blocks() -> None:
    main_pages = {"README.md", "docs/index.md", "docs/from-ddp.md", "docs/choosing.md", "docs/checkpoints.md"}
    assert main_pages <= set(PAGES_RUN)
    assert sum(block.is_run for block in BLOCKS) > 20


def test_skipped_blocks_are_listed_with_a_reason() -> None:
    assert {(block.page, block.reason) for block in BLOCKS if block.reason} == BLOCKS_NOT_RUN
    for block in BLOCKS:
        is_known = block.has_new_namespace or block.is_script or block.example or block.reason
        assert not block.comment or is_known, f"{block}: {block.comment!r}"


def test_example_excerpts_match_their_files() -> None:
    shown = [block for block in BLOCKS if block.example]
    names = {"train_sharded", "recover", "lightning_gpt", "lora_peft", "transformers_trainer", "accelerate_loop"}
    assert {block.example for block in shown} == {f"examples/{name}.py" for name in {*names, "ray_train"}}
    for block in shown:
        assert block.text in (ROOT / str(block.example)).read_text(encoding="utf-8"), str(block)


def test_every_block_declares_its_language() -> None:
    """Otherwise a block could be skipped by mistake."""
    for block in BLOCKS:
        assert block.language in LANGUAGES or block.page in PAGES_WITH_DRAWINGS, f"{block}: {block.language!r}"


COMMANDS = [command for block in BLOCKS if block.language in ("console", "bash") for command in commands_of(block)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imports of torch
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.block} {' '.join(command.words)[:40]}")
def test_shell_commands_are_valid(command: Command) -> None:
    tool, *args = command.words
    assert tool in COMMAND_CHECKS, f"there is no check for the command {tool}: add one to COMMAND_CHECKS in {__file__}"
    COMMAND_CHECKS[tool](args)


def check_make(args: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in args:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def check_pip(args: list[str]) -> None:
    """All extras exist."""
    assert args.pop(0) == "install"
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    for name in (name for word in args for names in re.findall(r"\[(.*)\]", word) for name in names.split(",")):
        assert re.search(rf"^{name} = \[", extras, re.MULTILINE), name


class _Parsed(BaseException):
    """A script has parsed its arguments."""


def check_script(args: list[str]) -> None:
    """The script exists. If there are arguments, it runs until it has parsed them."""
    if args[0] == "-m":
        check_module(args[1:])
        return
    script = ROOT / args[0]
    assert script.is_file(), script
    if not args[1:]:
        return
    parse_args: Callable[..., Any] = argparse.ArgumentParser.parse_args

    def parse_and_stop(*arguments: Any) -> NoReturn:
        parse_args(*arguments)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [str(script), *args[1:]])
        patch.syspath_prepend(script.parent)
        with pytest.raises(_Parsed):
            runpy.run_path(str(script), run_name="__main__")


def check_module(args: list[str]) -> None:
    """Check the commands of zeroshard; other modules are not checked."""
    if args[0] == "zeroshard":
        check_zeroshard(args[1:])


def check_torchrun(args: list[str]) -> None:
    options = get_args_parser().parse_args(args)
    if options.module:
        check_module([options.training_script, *options.training_script_args])
        return
    check_script([options.training_script, *options.training_script_args])


def check_zeroshard(args: list[str]) -> None:
    """Parse the arguments and options without running the command."""
    commands: Any = typer.main.get_command(app)
    commands.commands[args[0]].make_context(args[0], args[1:])


def check_git(args: list[str]) -> None:
    assert args[0] == "clone"


COMMAND_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "git": check_git,
    "make": check_make,
    "pip": check_pip,
    "python": check_script,
    "python3": check_script,
    ".venv/bin/python": check_script,
    "torchrun": check_torchrun,
    "zeroshard": check_zeroshard,
}
