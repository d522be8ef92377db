"""Record checkpoints and training runs with the present code: `python -m tests.recorded.write`.

Only after a change of numbers or of the file format that is meant to be one. tests/distributed/test_recorded.py
compares.
"""

import os

# As in tests/conftest.py. To be set before torch is imported.
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

TIMEOUT = 300.0


def record_run(ctx: RankContext, name: str) -> dict[str, str]:
    with MODES[name].training() as training:
        training.train()
        return {key: values.write_out(value) for key, value in training.values().items()}


def record_checkpoint(ctx: RankContext, name: str, folder: Path) -> None:
    """A zip file, since DCP's files consist mostly of padding, and what it is when it is loaded.

    Only that of nested state is not what was saved: as torch does, loading casts it to the dtype of its parameter.
    """
    with SAVED[name].training() as training:
        training.train(SAVED_AT)
        torch.manual_seed(ctx.rank)
        checkpoint.save(folder, step=SAVED_AT, extra=extra(ctx.rank), **training.parts())
        saved = training.digests()
    with SAVED[name].training() as training:
        checkpoint.load(folder, **training.parts())
        expected = training.digests()
    assert expected == saved or name == "nested state", values.list_differences(expected, saved)
    if ctx.rank == 0:
        (folder / ".lock").unlink()
        shutil.make_archive(str(values.checkpoint_file(name, "zip").with_suffix("")), "zip", folder)
        values.write(values.checkpoint_file(name, "json"), expected)


def record_drop_in(ctx: RankContext) -> None:
    """What a script for torch's class saves."""
    with MODES[DROP_IN].training() as training:
        training.train(SAVED_AT)
        training.optimizer.consolidate_state_dict()
        expected = {key: values.digest(value) for key, value in training.values().items()}
        if ctx.rank == 0:
            whole = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(whole, values.checkpoint_file(DROP_IN, "pt"))
            values.write(values.checkpoint_file(DROP_IN, "json"), expected)


def read_environment(ctx: RankContext) -> dict[str, str]:
    return environment()


def main() -> None:
    shutil.rmtree(values.CHECKPOINTS, ignore_errors=True)
    values.CHECKPOINTS.mkdir()
    with closing(RankPool()) as pool:
        for name in SAVED:
            with TemporaryDirectory() as folder:
                arguments = {"name": name, "folder": Path(folder)}
                pool.run(record_checkpoint, saved_by(name), TIMEOUT, arguments)
        pool.run(record_drop_in, 2, TIMEOUT)
        (found,) = pool.run(read_environment, 1)
        for size in (1, 2, 3, 4):
            runs: dict[str, Any] = {
                name: pool.run(record_run, size, TIMEOUT, {"name": name})[0]
                for name, mode in MODES.items()
                if size in mode.world_sizes
            }
            values.write(values.runs_file(size), {"environment": found, "runs": runs})
    total = sum(file.stat().st_size for file in Path(values.FOLDER).rglob("*") if file.suffix != ".py")
    sys.stdout.write(f"recorded {total} bytes in {values.FOLDER}\n")


if __name__ == "__main__":
    # Ranks find the functions by the name of their module, which is not __main__ there.
    import_module("tests.recorded.write").main()
