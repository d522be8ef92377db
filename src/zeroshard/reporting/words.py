"""How an optimizer is set up, in words."""

from collections.abc import Iterator

from ..build import EngineBuilder
from ..config import ZeroConfig
from ..layout.partition import FlatShards, WholeParams


def describe_setup(builder: EngineBuilder) -> tuple[str, ...]:
    """A line for each choice that makes a difference."""
    return (
        *_describe_owners(builder),
        *_describe_grads(builder),
        *_describe_params(builder),
        *_describe_policies(builder.config),
    )


def _describe_owners(builder: EngineBuilder) -> Iterator[str]:
    for kind, partition in zip(builder.optimizer_specs, builder.partitioning.partitioners, strict=True):
        if isinstance(partition, FlatShards):
            grain = partition.granularity
            cuts = "" if grain is None or grain.is_elementwise else f", cut at multiples of {grain.align} elements"
            yield f"{kind.name}: every rank updates a slice of every bucket{cuts}"
        elif isinstance(partition, WholeParams):
            yield f"{kind.name}: every parameter is updated by one rank"
        else:
            yield f"{kind.name}: owners are chosen by {type(partition).__qualname__}"


def _describe_grads(builder: EngineBuilder) -> Iterator[str]:
    if not builder.reduces_grads:
        yield "gradients: those in param.grad, which must be equal on all ranks"
        return
    kept = "freed when they are on their way (ZeRO-2)" if builder.config._stage_policy.frees else "kept, too (ZeRO-1)"
    yield f"gradients: each slice is averaged at its owner; those in param.grad are {kept}"
    if builder.config.reduce_dtype is not None:
        yield f"reduce_dtype={builder.config.reduce_dtype}"
    if builder.config.deterministic_reduce:
        yield "deterministic_reduce=True"


def _describe_params(builder: EngineBuilder) -> Iterator[str]:
    if builder.overlap_with_ddp:
        yield "parameters: updated and sent inside DDP's backward pass"
    elif builder.config.overlap_param_gather:
        yield "parameters: come back while the next forward pass runs"
    else:
        yield "parameters: come back at the end of step()"
    if builder.parameters_as_bucket_view and not builder.overlap_with_ddp and not builder.partitioning.is_flat:
        yield "they lie in flat buffers (parameters_as_bucket_view=True)"


def _describe_policies(config: ZeroConfig) -> Iterator[str]:
    if config.master_dtype is not None:
        yield f"master_dtype={config.master_dtype}"
    for policy in (config.offload, config.consistency_check, config.nonfinite, config.peer_checkpoint):
        if policy is not None:
            yield repr(policy)
    if not config.broadcast_buffers:
        yield "broadcast_buffers=False"
