"""Time `step()` on one GPU: one rank over NCCL, and rank 0 of many simulated ranks."""

from typing import NamedTuple

import torch

from ..harness.models import PEERS, RECIPES, Shape, large_gpt_shapes, make_params
from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, cuda_clock, ms, race, ratio, wall_clock

PEER_VIEWS = {f"{peer}{', bucket view' if view else ''}": (peer, view) for peer in PEERS for view in (False, True)}


class Machine(NamedTuple):
    """The device to run on: a GPU at full size, or another device with few parameters, to try the code."""

    device: str

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def shapes(self, model: str) -> list[Shape]:
        if model == MODELS[0]:
            return large_gpt_shapes() if self.device == "cuda" else [(64, 32)] * 12
        return [(1024,)] * (4000 if self.device == "cuda" else 40)

    def race(self, contestants: dict[str, Run], rounds: int, *, warm: bool = False) -> Times:
        """Race contestants. `warm`: repeat each run untimed first, so other tensors do not fill the host's caches."""
        clock = cuda_clock if self.device == "cuda" else wall_clock

        def warm_clock(run: Run) -> float:
            run()
            return clock(run)

        return race(contestants, rounds, clock=warm_clock if warm else clock)


MODELS = ("GPT 1.3B", "4,000 small")


def alone(machine: Machine, rounds: int) -> list[Row]:
    """Compare a step at world size 1 with the plain optimizer and with torch's class."""
    rows: list[Row] = []
    for model in MODELS:
        for recipe in ("fused AdamW", "foreach AdamW"):
            (times,) = run_ranks(1, _race_alone, machine, model, recipe, rounds, backend=machine.backend)
            what = f"step, {model}, 1 rank, {recipe}"
            rows += [row for view in ("", ", bucket view") for row in _rows_alone(what, times, view, machine)]
    return rows


def shares(machine: Machine, rounds: int) -> list[Row]:
    """Time rank 0's step at large world sizes. `fake` messages cost nothing."""
    rows: list[Row] = []
    for model in MODELS:
        (by_world,) = run_ranks(1, _race_as_rank_0, machine, model, rounds, backend="none")
        for world, times in by_world.items():
            for view in ("", ", bucket view"):
                ours, theirs = times[f"zeroshard{view}"], times[f"torch{view}"]
                what = f"rank 0's step of {world} (inner: {ms(times['share'])}), {model}, fused AdamW{view}"
                rows.append(ratio_row(what, ms(ours), f"{ms(theirs)} torch", ratio(ours, theirs)))
    return rows


def _rows_alone(what: str, times: Times, view: str, machine: Machine) -> list[Row]:
    ours = times[f"zeroshard{view}"]
    bars = {f"plain{view}": 1.1 if machine.device == "cuda" else None, f"torch{view}": None}
    return [
        ratio_row(what + view, ms(ours), f"{ms(times[peer])} {peer.split(',')[0]}", ratio(ours, times[peer]), bar)
        for peer, bar in bars.items()
    ]


def _race_alone(machine: Machine, model: str, recipe: str, rounds: int) -> Times:
    shapes = machine.shapes(model)
    grads = _make_grads(shapes, machine)
    contestants: dict[str, Run] = {}
    for name, (peer, view) in PEER_VIEWS.items():
        params = _make_params(shapes, machine, grads)
        contestants[name] = RECIPES[recipe].sharded(peer, params, bucket_view=view).step
        if name.startswith("zeroshard"):
            # On the same parameter objects: with thousands of them, the host's caches determine the time.
            contestants[name.replace("zeroshard", "plain")] = RECIPES[recipe].plain(params).step
    return machine.race(contestants, rounds)


def _race_as_rank_0(machine: Machine, model: str, rounds: int) -> dict[int, Times]:
    shapes, recipe = machine.shapes(model), RECIPES["fused AdamW"]
    grads = _make_grads(shapes, machine)
    by_world: dict[int, Times] = {}
    for world in (8, 64, 512):
        with fake_group(world):
            contestants: dict[str, Run] = {}
            for name, (peer, view) in PEER_VIEWS.items():
                optimizer = recipe.sharded(peer, _make_params(shapes, machine, grads), bucket_view=view)
                contestants[name] = optimizer.step
                owned = [tuple(param.shape) for group in optimizer.optim.param_groups for param in group["params"]]
            contestants["share"] = recipe.plain(_make_params(owned, machine, ())).step
            by_world[world] = machine.race(contestants, rounds)
    return by_world


def _make_grads(shapes: list[Shape], machine: Machine) -> list[torch.Tensor]:
    """Make gradients that all contestants share, to save memory."""
    return [torch.randn(shape, device=machine.device) * 1e-2 for shape in shapes]


def _make_params(shapes: list[Shape], machine: Machine, grads: "list[torch.Tensor] | tuple[()]") -> list[torch.Tensor]:
    return make_params(shapes, device=machine.device, grads=grads)
