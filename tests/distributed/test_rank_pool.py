"""The rank pool itself: arguments, results, failures and reuse of workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support import RankContext, RankFailures, RankPool, ranks

ROOT = Path(__file__).parents[2]


def rank_and_pid(ctx: RankContext) -> tuple[int, int]:
    return ctx.rank, os.getpid()


def assert_pool_works(pool: RankPool) -> None:
    assert [rank for rank, _ in pool.run(rank_and_pid, 2)] == [0, 1]


@ranks(1, 2, 3, 4, 5)
def test_body_runs_on_every_rank(ctx: RankContext) -> None:
    total = torch.tensor(ctx.rank)
    dist.all_reduce(total)
    assert total == sum(range(ctx.world_size))
    assert (dist.get_rank(), dist.get_world_size()) == (ctx.rank, ctx.world_size)
    assert len(set(ctx.gather(os.getpid()))) == ctx.world_size


@ranks(2)
@pytest.mark.parametrize("word", ["a", "b"])
def test_parametrization_and_fixtures_reach_the_ranks(ctx: RankContext, word: str, tmp_path: Path) -> None:
    (tmp_path / f"{word}{ctx.rank}").touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {f"{word}0", f"{word}1"}


@pytest.mark.parametrize("tensor", [torch.arange(3)], ids=["tensor"])
@ranks(1, timeout=20)
def test_parametrization_accepts_tensors(ctx: RankContext, tensor: torch.Tensor) -> None:
    assert tensor.tolist() == [0, 1, 2]


def leak_global_state(ctx: RankContext) -> float:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    register_optimizer_step_post_hook(fail_on_step)
    return torch.rand((), dtype=torch.float32).item()


def fail_on_step(*_: object) -> NoReturn:
    raise AssertionError("the hook of an earlier run")


def assert_no_leaked_state(ctx: RankContext) -> float:
    assert torch.ones(()).dtype == torch.float32
    assert torch.is_grad_enabled()
    warnings.warn("not an error", stacklevel=1)
    random_value = torch.rand(()).item()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    return random_value


def test_nothing_leaks_into_the_next_run(rank_pool: RankPool) -> None:
    assert rank_pool.run(leak_global_state, 2) == rank_pool.run(assert_no_leaked_state, 2)


def fail_on_one(ctx: RankContext) -> None:
    answer = ctx.rank + 41
    if ctx.rank == 1:
        assert answer == 41


def test_failure_is_reported_with_traceback(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(fail_on_one, 3)
    report = str(caught.value)
    assert report.startswith("failed: rank 1; passed: rank 0, 2")
    assert "[rank 1] failed" in report
    assert "in fail_on_one" in report
    assert "assert 42 == 41" in report
    assert_pool_works(rank_pool)


def leave_peers_in_collective(ctx: RankContext) -> None:
    if ctx.rank == 0:
        raise ValueError("the cause")
    dist.barrier()


def test_peers_of_failed_rank_do_not_wait_for_timeout(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(leave_peers_in_collective, 3, timeout=100)
    outcomes = caught.value.outcomes
    assert next(iter(outcomes)) == 0
    assert "the cause" in outcomes[0].detail
    assert all("in leave_peers_in_collective" in outcomes[rank].detail for rank in (1, 2))


def hang_after_failure(ctx: RankContext) -> None:
    dist.barrier()
    if ctx.rank == 0:
        raise ValueError("the cause")
    wait_forever()


def wait_forever() -> None:
    threading.Event().wait()


def test_rank_hanging_after_failure_is_terminated(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(hang_after_failure, 2, timeout=100)
    report = str(caught.value)
    assert report.startswith("failed: rank 0; stuck: rank 1")
    assert "in wait_forever" in report


def hang(ctx: RankContext) -> None:
    wait_forever()


def test_hang_is_reported_with_stacks(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(hang, 2, timeout=3)
    for rank in (0, 1):
        assert caught.value.outcomes[rank].status == "stuck"
        assert "in wait_forever" in caught.value.outcomes[rank].detail
    assert_pool_works(rank_pool)


def exit_with_code(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os._exit(7)


def die_by_signal(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("body", "exit_message"), [(exit_with_code, "exited with code 7"), (die_by_signal, "died of SIGKILL")]
)
def test_dead_worker_is_reported(rank_pool: RankPool, body: Callable[..., None], exit_message: str) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(body, 2)
    assert f"[rank 1] failed\n{exit_message}" in str(caught.value)
    assert_pool_works(rank_pool)


def skip_on_one_rank(ctx: RankContext) -> None:
    if ctx.rank == 0:
        pytest.skip("not here")


def test_skip_on_one_rank_skips_the_test(rank_pool: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        rank_pool.run(skip_on_one_rank, 2)
    assert_pool_works(rank_pool)


def test_workers_are_reused_and_exit_with_the_pool() -> None:
    with closing(RankPool()) as pool:
        first, second = pool.run(rank_and_pid, 2), pool.run(rank_and_pid, 2)
    assert first == second
    for _, pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def leave_thread_on_rank_1(ctx: RankContext) -> int:
    if ctx.rank == 1:
        threading.Thread(target=wait_forever, name="zeroshard-test", daemon=True).start()
    return os.getpid()


def test_worker_with_leftover_threads_is_replaced() -> None:
    with closing(RankPool()) as pool:
        before = pool.run(leave_thread_on_rank_1, 2)
        after = [pid for _, pid in pool.run(rank_and_pid, 2)]
    assert before[0] in after
    assert before[1] not in after


def kill_the_parent(ctx: RankContext) -> None:
    dist.barrier()
    parent = multiprocessing.parent_process()
    if parent and ctx.rank == 0:
        os.kill(parent.pid or os.getpid(), signal.SIGKILL)
    wait_forever()


def test_busy_workers_do_not_outlive_the_parent() -> None:
    module = kill_the_parent.__module__
    script = f"from {module} import RankPool, kill_the_parent; RankPool().run(kill_the_parent, 2)"
    # The workers hold stdout open: the call returns once all of them are gone.
    parent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL
