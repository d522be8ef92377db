"""What the log says of an optimizer that was made."""

import logging

from ..build import EngineBuilder
from .._logging import is_enabled_for, log_rank
from ..engine.base import Engine
from .words import describe_setup


def log_summary(builder: EngineBuilder, engine: Engine) -> None:
    """One line, on rank 0; with DEBUG one more for each bucket, on every rank."""
    rank = engine.comm.data_parallel.group.rank
    if rank == 0 and is_enabled_for(logging.INFO):
        log_rank(logging.INFO, rank, "%s", format_summary_line(builder, engine))
    for bucket in engine.layout.buckets if is_enabled_for(logging.DEBUG) else ():
        mine = bucket.shards[engine.comm.group.rank]
        what = engine.layout.describe_bucket(bucket.index, "elements") if bucket.slots else f"bucket {bucket.index}"
        log_rank(logging.DEBUG, rank, "owns %d of %d %s, %s", mine.length, bucket.numel, what, bucket.dtype)


def format_summary_line(builder: EngineBuilder, engine: Engine) -> str:
    """What was sharded, and how."""
    layout, names = engine.layout, " and ".join(kind.name for kind in builder.optimizer_specs)
    elements, ranks = sum(spec.numel for spec in layout.params), engine.comm.group.size
    rows = engine.comm.data_parallel.group.size // ranks
    where = f"{ranks} ranks" + (f" in each of {rows} rows" if rows > 1 else "")
    what = f"{names} on {elements:,} elements of {len(layout.params)} parameters in {len(layout.buckets)} buckets"
    return f"{what}, shared by {where}. {'. '.join(describe_setup(builder))}"
