"""DDP communication hooks that step a `ZeroRedundancyOptimizer` inside the backward pass.

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

Then `loss.backward()` updates the parameters, and `zero.step()` is not needed. DDP settles its buckets in the
first two backward passes (three with `static_graph=True`); these make no update.
"""

from torch.nn.parallel import DistributedDataParallel

from .engine.ddp import CommHook
from .optimizer import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Step bucket by bucket once the last gradient bucket has been handed over.

    `hook` reduces a bucket, such as torch's `allreduce_hook`. A bucket belongs to the rank (bucket index modulo
    group size), or, with `shard_buckets=True`, its parameters are dealt out among the ranks.
    """
    return zero._required_ddp_overlap.wrap_comm_hook(ddp, hook, zero, shard_buckets=shard_buckets, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: CommHook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Like `hook_with_zero_step`, but a bucket is stepped while backward still works on the next ones."""
    return zero._required_ddp_overlap.wrap_comm_hook(ddp, hook, zero, shard_buckets=shard_buckets, is_interleaved=True)
