"""What ranks print: uncaught errors with the user's frames, and their traceback and warnings on one rank only."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.tiers import sampled
from zeroshard._formatting import format_ranks
from zeroshard._tracebacks import FULL_TRACEBACK_VARIABLE

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import zeroshard

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=int(sys.argv[4]))
model = torch.nn.Linear(4, 4)
exec(sys.argv[3])
"""
INSTANCE = "zeroshard.shard(model, torch.optim.AdamW(model.parameters()))"
DIFFERENT_LR = "zeroshard.shard(model, torch.optim.AdamW, lr=0.1 * (1 + rank))"
UNKNOWN_OPTION = "zeroshard.shard(model, torch.optim.AdamW, learning_rate=0.1)"
NOT_A_DICT = "zeroshard.shard(model, torch.optim.AdamW, lr=0.1).load_state_dict({'state': {}})"
MISSING_CHECKPOINT = "zeroshard.checkpoint.load('missing', model=model)"
INVALID_CONFIG = "zeroshard.ZeroConfig(master_dtype='float32')"
INVALID_LR_ON_RANK_1 = "zeroshard.shard(model, torch.optim.AdamW, lr=0.1 - rank)"


DIFFERENT_CALLS = """
optimizer = zeroshard.shard(model, torch.optim.SGD, lr=0.1)
try:
    if rank == 1:
        raise ValueError("the root cause")
    optimizer.step()
finally:
    optimizer.full_state_dict(to=0)
"""
ERROR_BEFORE_DDP_REDUCES = """
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = zeroshard.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
loss = ddp(torch.ones(2, 4)).sum()
if rank == 1:
    raise ValueError("the root cause")
loss.backward()
"""
CALL_ON_RANK_0 = """
from datetime import timedelta
from zeroshard.comm import failure

failure.REPORT_TIMEOUT_S = failure.DISCONNECTED_GRACE_S = failure.STORE_TIMEOUT_S = 20.0
dist.barrier()  # all ranks have started: the short timeout is for the mistake
group = dist.new_group(timeout=timedelta(seconds=5))
ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
optimizer = zeroshard.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)

def train():
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

train()
if rank == 0:
    {}
train()
"""
SAVE = "zeroshard.checkpoint.save('saved', step=1, optimizer=optimizer, process_group=group)"
WARNING_OF_ALL_RANKS = """
from zeroshard._logging import warn_at_caller
zeroshard.shard(model, torch.optim.SGD, lr=0.1)
warn_at_caller("look out")
"""
WARNING_OF_RANK_1 = """
from zeroshard._logging import warn_at_caller
group = dist.new_group([1])
if rank == 1:
    zeroshard.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    warn_at_caller("look out")
"""
OWN_HOOK = """
def hook(error_type, error, traceback):
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    print("[rank]: own hook", error_type.__name__, *frames, file=sys.stderr)

sys.excepthook = hook
"""


def count_frames(lines: list[str]) -> int:
    return sum(line.lstrip().startswith("File ") for line in lines)


def run_ranks(folder: Path, call: str, *, script: str = SCRIPT, env: dict[str, str] | None = None) -> list[list[str]]:
    """Run the script on two ranks, and return the lines of the uncaught error that each has printed."""
    printed = run_script(folder, call, script=script, exit_code=1, env=env)
    return [[line.partition("]: ")[2] for line in text.splitlines() if line.startswith("[rank")] for text in printed]


def run_script(
    folder: Path,
    call: str,
    *,
    script: str = SCRIPT,
    num_ranks: int = 2,
    exit_code: int = 0,
    env: dict[str, str] | None = None,
) -> list[str]:
    """Run the script on all ranks, and return what each has printed to stderr."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "train.py").write_text(script, encoding="ascii")
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "train.py"), str(rank), str(folder / "rendezvous"), call, str(num_ranks)],
            env={**os.environ, **settings, **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [exit_code] * num_ranks, printed
    return printed


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (INSTANCE, "TypeError: expected optimizer_class"),
        (DIFFERENT_LR, "zeroshard.errors.RankMismatchError: zeroshard"),
        (UNKNOWN_OPTION, "TypeError: AdamW.__init__() got an unexpected keyword argument 'learning_rate'"),
        (NOT_A_DICT, "zeroshard.errors.CheckpointError: "),
    ],
)
def test_same_error_on_all_ranks_is_explained_by_rank_0(tmp_path: Path, call: str, error: str) -> None:
    first, second = run_ranks(tmp_path, call)
    assert first[0] == "Traceback (most recent call last):"
    assert count_frames(first) == 2  # exec, and the call in it
    assert first[-2].startswith(error)
    assert first[-1] == f"{FULL_TRACEBACK_VARIABLE}=1 shows the whole traceback."
    assert count_frames(second) == 1
    assert second[-2:] == [first[-2], "Rank 0 has the same error."]


def test_other_ranks_refer_to_the_one_that_failed(tmp_path: Path) -> None:
    """Frames of code that zeroshard has called are shown."""
    first, second = run_ranks(tmp_path, INVALID_LR_ON_RANK_1)
    assert count_frames(first) == 1
    assert first[-1].startswith("zeroshard.errors.RankFailedError: zeroshard.shard(): rank 1 failed: ValueError: Inval")
    assert any("torch/optim/adam.py" in line for line in second)
    assert not any("zeroshard/" in line for line in second)


def test_rank_that_looks_for_a_checkpoint_explains(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, MISSING_CHECKPOINT)
    assert count_frames(first) == 2
    assert count_frames(second) == 1
    assert second[-1].endswith("rank 0 failed: CheckpointError: missing does not exist. Check the path.")


def test_rank_that_ddp_has_lost_is_named(tmp_path: Path) -> None:
    """DDP's own error says only that a connection closed."""
    first, second = run_script(tmp_path, ERROR_BEFORE_DDP_REDUCES, exit_code=1)
    expected = "rank 0: connection lost outside of zeroshard: rank 1 of 2 failed with ValueError: the root cause."
    assert expected in first.splitlines()
    assert "outside of zeroshard" not in second


@sampled("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "call", "place"),
    [
        ("consolidate_state_dict", "optimizer.consolidate_state_dict()", "consolidate_state_dict"),
        ("checkpoint.save", SAVE, "checkpoint.save"),
        ("step()", "optimizer.step()", "step 2"),
    ],
    ids=["consolidate", "save", "step"],
)
def test_call_under_if_rank_0_is_explained_on_all_ranks(
    tmp_path: Path, name: str, call: str, place: str, num_ranks: int
) -> None:
    """The others are in DDP. gloo must not pair its messages with the status messages of the call."""
    first, *others = run_script(tmp_path, CALL_ON_RANK_0.format(call), num_ranks=num_ranks, exit_code=1)
    problem = (
        f"the ranks are waiting in different calls: rank 0 in {place}; {format_ranks(range(1, num_ranks))} outside of "
        "zeroshard (in DDP, for example in backward, or in another collective of the program)."
    )
    advice = (
        f"All ranks must make the same calls in the same order: call {name} on all ranks. Look for it under "
        "`if rank == 0:`, or for a loop that is shorter on one rank. Then restart: the process group can no longer be "
        "used."
    )
    assert f"RankLostError: {problem}\n[rank0]: {advice}\n" in first
    for rank, text in enumerate(others, start=1):
        expected = f"rank {rank}: connection lost outside of zeroshard: {problem} {advice}"
        assert text.splitlines()[0] == expected, "before the traceback of DDP"
        assert f"[rank{rank}]: RuntimeError: " in text


@pytest.mark.parametrize(
    ("call", "error"),
    [(INVALID_CONFIG, "expected ZeroConfig(master_dtype=...)"), (DIFFERENT_LR, "call torch.distributed.init_process")],
)
def test_errors_before_the_process_group_are_short(tmp_path: Path, call: str, error: str) -> None:
    script = SCRIPT.replace("dist.init_process_group(", "(lambda *_, **__: None)(")
    for text in run_script(tmp_path, call, script=script, exit_code=1):
        assert error in text.splitlines()[-2]
        assert count_frames(text.splitlines()) == 2


def test_errors_that_the_user_was_handling_are_printed(tmp_path: Path) -> None:
    """Ranks in different calls print their own frames: these show what differs."""
    for rank, lines in enumerate(run_ranks(tmp_path, DIFFERENT_CALLS)):
        assert ("ValueError: the root cause" in lines) == (rank == 1)
        assert any("zeroshard.errors.Rank" in line and "different calls" in line for line in lines)
        assert not any("has the same error" in line for line in lines)
        start_of_last = max(index for index, line in enumerate(lines) if line.startswith("Traceback"))
        assert count_frames(lines[start_of_last:]) >= 2
        assert not any("zeroshard/" in line for line in lines[start_of_last:])


def test_hooks_of_the_program_get_all_frames(tmp_path: Path) -> None:
    """A hook that a program sets later wraps ours, and torch's wraps one that was set before init_process_group()."""
    hook_before_init = SCRIPT.replace("dist.init_process_group(", OWN_HOOK + "dist.init_process_group(")
    for script, call in ((SCRIPT, OWN_HOOK + INSTANCE), (hook_before_init, INSTANCE)):
        for lines in run_ranks(tmp_path, call, script=script):
            (line,) = (line for line in lines if "own hook TypeError" in line)
            assert "zeroshard/build.py" in line


def test_whole_traceback_on_request(tmp_path: Path) -> None:
    for lines in run_ranks(tmp_path, INSTANCE, env={FULL_TRACEBACK_VARIABLE: "1"}):
        assert any("zeroshard/build.py" in line for line in lines)
        assert lines[-1].startswith("TypeError: expected optimizer_class")


@pytest.mark.parametrize(("call", "rank"), [(WARNING_OF_ALL_RANKS, 0), (WARNING_OF_RANK_1, 1)], ids=["all", "rank 1"])
def test_warnings_are_printed_by_the_first_rank_of_a_group(tmp_path: Path, call: str, rank: int) -> None:
    assert ["look out" in text for text in run_script(tmp_path, call)] == [rank == 0, rank == 1]
