"""Time construction, and its growth with the number of ranks."""

import torch.distributed as dist

from ..harness.models import PEERS, RECIPES, Shape, make_params
from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, ms, race, ratio

PARAMS: list[Shape] = [(32,)] * 10_000
FEW, MANY = 8, 1024


def growth(rounds: int) -> list[Row]:
    """Shard 10,000 parameters over simulated ranks, with the `fake` backend."""
    (times,) = run_ranks(1, _race, rounds, backend="none")
    rows = []
    for peer, bar in (("zeroshard", 1.3), ("torch", None)):
        few, many = times[f"{peer} {FEW}"], times[f"{peer} {MANY}"]
        cells = (f"{ms(few)} -> {ms(many)}", "") if peer == "zeroshard" else ("", f"{ms(few)} -> {ms(many)} torch")
        rows.append(ratio_row(f"construct, 10,000 tiny, {FEW} -> {MANY:,} ranks", *cells, ratio(many, few), bar))
    return rows


def _race(rounds: int) -> Times:
    params = make_params(PARAMS)
    with fake_group(MANY):
        groups = {size: dist.new_group(list(range(size))) for size in (FEW, MANY)}

        def make_contestant(peer: str, size: int) -> Run:
            recipe = RECIPES["SGD"]
            return lambda: PEERS[peer](params, recipe.make, process_group=groups[size], **recipe.options)

        contestants = {f"{peer} {size}": make_contestant(peer, size) for peer in PEERS for size in groups}
        return race(contestants, rounds, warmup=1)
