"""Record checkpoints and training runs with the current code: `python -m tests.recorded.write`.

Only for intended changes of results or of the file format. tests/distributed/test_recorded.py compares with the
recorded results.
"""

import os

# As in tests/conftest.py. Must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import shutil
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.recorded import values
from tests.recorded.modes import DROP_IN, MODES, SAVED, SAVED_AT, environment, extra, saved_by
from tests.support.pool import RankContext, RankPool
from zeroshard import checkpoint

TIMEOUT_S = 300.0


def record_run(ctx: RankContext, name: str) -> dict[str, str]:
    with MODES[name].training() as training:
        training.train()
        return {key: values.write_out(value) for key, value in training.values().items()}


def record_checkpoint(ctx: RankContext, name: str, directory: Path) -> None:
    """Write the checkpoint as a zip file, because DCP's files are mostly padding, and digests of the loaded values.

    Loaded values equal the saved ones except in "nested state": as in torch, loading casts state to the dtype of its
    parameter.
    """
    with SAVED[name].training() as training:
        training.train(SAVED_AT)
        torch.manual_seed(ctx.rank)
        checkpoint.save(directory, step=SAVED_AT, extra=extra(ctx.rank), **training.parts())
        saved = training.digests()
    with SAVED[name].training() as training:
        checkpoint.load(directory, **training.parts())
        expected = training.digests()
    assert expected == saved or name == "nested state", values.list_differences(expected, saved)
    if ctx.rank == 0:
        (directory / ".lock").unlink()
        shutil.make_archive(str(values.checkpoint_file(name, "zip").with_suffix("")), "zip", directory)
        values.write(values.checkpoint_file(name, "json"), expected)


def record_drop_in(ctx: RankContext) -> None:
    """Write the state dicts that a script for torch's class saves with `torch.save`."""
    with MODES[DROP_IN].training() as training:
        training.train(SAVED_AT)
        training.optimizer.consolidate_state_dict()
        expected = {key: values.digest(value) for key, value in training.values().items()}
        if ctx.rank == 0:
            state_dicts = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state_dicts, values.checkpoint_file(DROP_IN, "pt"))
            values.write(values.checkpoint_file(DROP_IN, "json"), expected)


def read_environment(ctx: RankContext) -> dict[str, str]:
    return environment()


def main() -> None:
    shutil.rmtree(values.CHECKPOINTS, ignore_errors=True)
    values.CHECKPOINTS.mkdir()
    with closing(RankPool()) as pool:
        for name in SAVED:
            with TemporaryDirectory() as directory:
                arguments = {"name": name, "directory": Path(directory)}
                pool.run(record_checkpoint, saved_by(name), TIMEOUT_S, arguments)
        pool.run(record_drop_in, 2, TIMEOUT_S)
        (recorded_environment,) = pool.run(read_environment, 1)
        for size in (1, 2, 3, 4):
            runs: dict[str, Any] = {
                name: pool.run(record_run, size, TIMEOUT_S, {"name": name})[0]
                for name, mode in MODES.items()
                if size in mode.world_sizes
            }
            values.write(values.runs_file(size), {"environment": recorded_environment, "runs": runs})
    total = sum(file.stat().st_size for file in Path(values.DIRECTORY).rglob("*") if file.suffix != ".py")
    sys.stdout.write(f"recorded {total} bytes in {values.DIRECTORY}\n")


if __name__ == "__main__":
    # Ranks import the functions from this module by its name, which is not __main__ there.
    import_module("tests.recorded.write").main()
