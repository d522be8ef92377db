"""What the log says of an optimizer that was made."""

import logging

from ..assembly import Assembly
from ..notices import is_logged, log
from ..runtime.step import Engine
from .words import in_words


def announce(assembly: Assembly, engine: Engine) -> None:
    """One line, on rank 0; with DEBUG one more for each bucket, on every rank."""
    rank = engine.comm.everyone.group.rank
    if rank == 0 and is_logged(logging.INFO):
        log(logging.INFO, rank, "%s", in_a_line(assembly, engine))
    for bucket in engine.layout.buckets if is_logged(logging.DEBUG) else ():
        mine = bucket.shards[engine.comm.group.rank]
        what = engine.layout.name_bucket(bucket.index, "elements") if bucket.rooms else f"bucket {bucket.index}"
        log(logging.DEBUG, rank, "owns %d of %d %s, %s", mine.length, bucket.numel, what, bucket.dtype)


def in_a_line(assembly: Assembly, engine: Engine) -> str:
    """What was sharded, and how."""
    layout, names = engine.layout, " and ".join(kind.name for kind in assembly.kinds)
    elements, ranks = sum(spec.numel for spec in layout.params), engine.comm.group.size
    rows = engine.comm.everyone.group.size // ranks
    where = f"{ranks} ranks" + (f" in each of {rows} rows" if rows > 1 else "")
    what = f"{names} on {elements:,} elements of {len(layout.params)} parameters in {len(layout.buckets)} buckets"
    return f"{what}, shared by {where}. {'. '.join(in_words(assembly))}"
