"""How an optimizer is set up, in words."""

from collections.abc import Iterator

from ..assembly import Assembly
from ..config import ZeroConfig
from ..layout.partition import FlatShards, WholeParams


def in_words(assembly: Assembly) -> tuple[str, ...]:
    """A line for each choice that makes a difference."""
    return (*_owners(assembly), *_gradients(assembly), *_parameters(assembly), *_policies(assembly.config))


def _owners(assembly: Assembly) -> Iterator[str]:
    for kind, partition in zip(assembly.kinds, assembly.division.partitions, strict=True):
        if isinstance(partition, FlatShards):
            grain = partition.grain
            cuts = "" if grain is None or grain.is_fine else f", cut at multiples of {grain.align} elements"
            yield f"{kind.name}: every rank updates a slice of every bucket{cuts}"
        elif isinstance(partition, WholeParams):
            yield f"{kind.name}: every parameter is updated by one rank"
        else:
            yield f"{kind.name}: owners are chosen by {type(partition).__qualname__}"


def _gradients(assembly: Assembly) -> Iterator[str]:
    if not assembly.reduces:
        yield "gradients: those in param.grad, which must be equal on all ranks"
        return
    kept = "freed when they are on their way (ZeRO-2)" if assembly.config._stage_policy.frees else "kept, too (ZeRO-1)"
    yield f"gradients: each slice is averaged at its owner; those in param.grad are {kept}"
    if assembly.config.reduce_dtype is not None:
        yield f"reduce_dtype={assembly.config.reduce_dtype}"
    if assembly.config.deterministic_reduce:
        yield "deterministic_reduce=True"


def _parameters(assembly: Assembly) -> Iterator[str]:
    if assembly.overlap:
        yield "parameters: updated and sent inside DDP's backward pass"
    elif assembly.config.overlap_gather:
        yield "parameters: come back while the next forward pass runs"
    else:
        yield "parameters: come back at the end of step()"
    if assembly.bucket_view and not assembly.overlap and not assembly.division.flat:
        yield "they lie in flat buffers (parameters_as_bucket_view=True)"


def _policies(config: ZeroConfig) -> Iterator[str]:
    if config.master_dtype is not None:
        yield f"master_dtype={config.master_dtype}"
    for policy in (config.offload, config.drift, config.nonfinite, config.second_copy):
        if policy is not None:
            yield repr(policy)
    if not config.sync_buffers:
        yield "sync_buffers=False"
