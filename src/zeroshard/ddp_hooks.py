"""DDP communication hooks that step a `ZeroRedundancyOptimizer` inside the backward pass.

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

`loss.backward()` then updates the parameters, and `zero.step()` is not needed. DDP rebuilds its buckets during the
first two backward passes (three with `static_graph=True`), so these do not update anything.
"""

from torch.nn.parallel import DistributedDataParallel

from .engine.ddp import CommHook
from .optimizer import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Return a DDP hook that steps `zero` bucket by bucket after the last gradient bucket was sent.

    Args:
        hook: Communication hook that reduces a bucket, such as torch's `allreduce_hook`.
        ddp: The DDP module on which the returned hook will be registered.
        zero: Optimizer of its parameters, constructed with `overlap_with_ddp=True` over the same process group.
        shard_buckets: Distribute the parameters of each bucket over all ranks. By default bucket `i` belongs to rank
            `i % world_size`.

    Returns:
        The hook for `ddp.register_comm_hook`.

    Raises:
        ConfigError: If `zero` was constructed without `overlap_with_ddp=True`, or its ranks are not those of `ddp`.
    """
    return zero._required_ddp_overlap.wrap_comm_hook(ddp, hook, zero, shard_buckets=shard_buckets, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Return a DDP hook like `hook_with_zero_step` that steps each bucket while backward computes the next ones.

    Args:
        hook: As for `hook_with_zero_step`.
        ddp: As for `hook_with_zero_step`.
        zero: As for `hook_with_zero_step`.
        shard_buckets: As for `hook_with_zero_step`.

    Returns:
        The hook for `ddp.register_comm_hook`.

    Raises:
        ConfigError: As for `hook_with_zero_step`.
    """
    return zero._required_ddp_overlap.wrap_comm_hook(ddp, hook, zero, shard_buckets=shard_buckets, is_interleaved=True)
