"""Time a full training iteration under DDP, for context."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ..harness.models import PEERS, RECIPES, Recipe, gpt
from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, ms, race, ratio, slowest

CONTESTANTS = ("zeroshard", "zeroshard, bucket view", "torch", "torch, bucket view", "plain")


def iterations(rounds: int) -> list[Row]:
    """Train the GPT under DDP with each optimizer, on 2 ranks."""
    rows: list[Row] = []
    for recipe in ("fused AdamW", "AdamW"):
        times = slowest(run_ranks(2, _race, recipe, rounds))
        for ours in CONTESTANTS[:2]:
            for peer in (ours.replace("zeroshard", "torch"), "plain"):
                what = f"DDP iteration, GPT 26M, 2 ranks, {ours.replace('zeroshard', recipe)}"
                cells = (ms(times[ours]), f"{ms(times[peer])} {peer.split(',')[0]}")
                rows.append(ratio_row(what, *cells, ratio(times[ours], times[peer])))
    return rows


def _race(recipe: str, rounds: int) -> Times:
    return race({name: _make_contestant(RECIPES[recipe], name) for name in CONTESTANTS}, rounds, warmup=3)


def _make_contestant(recipe: Recipe, name: str) -> Run:
    model = DistributedDataParallel(gpt())
    params = list(model.parameters())
    peer, *view = name.split(", ")
    optimizer: Any = recipe.sharded(peer, params, bucket_view=bool(view)) if peer in PEERS else recipe.plain(params)
    ids = torch.randint(2048, (1, 65), generator=torch.Generator().manual_seed(1))

    def iterate() -> None:
        loss: Any = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return iterate
