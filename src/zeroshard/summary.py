"""What an optimizer was configured to do, as text: for its report, and for the log after its construction."""

import logging
from collections.abc import Iterator

from ._logging import is_enabled_for, log_rank
from .build import EngineBuilder
from .config import ZeroConfig
from .engine.base import Engine


def describe_setup(builder: EngineBuilder, engine: Engine) -> tuple[str, ...]:
    """Return one line per configuration choice that changes behaviour."""
    return (
        *_describe_owners(builder),
        *_describe_grads(builder, engine),
        *_describe_params(builder),
        *_describe_policies(builder.config),
    )


def _describe_owners(builder: EngineBuilder) -> Iterator[str]:
    for optimizer, partitioner in zip(builder.optimizer_specs, builder.partitioning.partitioners, strict=True):
        yield f"{optimizer.name}: {partitioner.describe()}"


def _describe_grads(builder: EngineBuilder, engine: Engine) -> Iterator[str]:
    if not engine.grads.reduces:
        yield "gradients: taken from param.grad, which must be equal on all ranks"
        return
    kept = "kept (ZeRO-1)" if builder.config.stage == 1 else "freed (ZeRO-2)"
    yield f"gradients: reduce-scattered during backward; param.grad is {kept}"
    if builder.config.reduce_dtype is not None:
        yield f"reduce_dtype={builder.config.reduce_dtype}"
    if builder.config.deterministic_reduce:
        yield "deterministic_reduce=True"


def _describe_params(builder: EngineBuilder) -> Iterator[str]:
    if builder.overlap_with_ddp:
        yield "parameters: updated and sent inside DDP's backward pass"
    elif builder.config.overlap_param_gather:
        yield "parameters: all-gathered during the next forward pass"
    else:
        yield "parameters: sent to all ranks at the end of step()"
    if builder.parameters_as_bucket_view and not builder.overlap_with_ddp and not builder.partitioning.is_flat:
        yield "parameters_as_bucket_view=True"


def _describe_policies(config: ZeroConfig) -> Iterator[str]:
    if config.master_dtype is not None:
        yield f"master_dtype={config.master_dtype}"
    for policy in (config.offload, config.consistency_check, config.nonfinite, config.peer_checkpoint):
        if policy is not None:
            yield repr(policy)
    if not config.broadcast_buffers:
        yield "broadcast_buffers=False"


def log_summary(builder: EngineBuilder, engine: Engine) -> None:
    """Log one line on rank 0 (INFO) and one line per bucket on every rank (DEBUG)."""
    rank = engine.comm.data_parallel.group.rank
    if rank == 0 and is_enabled_for(logging.INFO):
        log_rank(logging.INFO, rank, "%s", format_summary_line(builder, engine))
    for bucket in engine.layout.buckets if is_enabled_for(logging.DEBUG) else ():
        own_shard = bucket.shards[engine.comm.group.rank]
        description = (
            engine.layout.describe_bucket(bucket.index, "elements") if bucket.slots else f"bucket {bucket.index}"
        )
        log_rank(logging.DEBUG, rank, "owns %d of %d %s, %s", own_shard.length, bucket.numel, description, bucket.dtype)


def format_summary_line(builder: EngineBuilder, engine: Engine) -> str:
    """Describe in one line what is sharded and how."""
    layout, names = engine.layout, " and ".join(spec.name for spec in builder.optimizer_specs)
    elements, ranks = sum(spec.numel for spec in layout.params), engine.comm.group.size
    replicas = engine.comm.data_parallel.group.size // ranks
    where = f"{ranks} ranks" + (f" in each of {replicas} replicas" if replicas > 1 else "")
    what = f"{names} on {elements:,} elements of {len(layout.params)} parameters in {len(layout.buckets)} buckets"
    return f"{what}, shared by {where}. {'. '.join(describe_setup(builder, engine))}"
