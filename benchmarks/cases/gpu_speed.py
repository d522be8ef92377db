"""`step()` on one GPU: alone over NCCL, and as rank 0 of many ranks that do not exist."""

from typing import NamedTuple

import torch

from ..harness.models import PEERS, RECIPES, Shape, large_gpt_shapes, make_params
from ..harness.ranks import fake_group, run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Run, Times, cuda_clock, ms, race, ratio, wall_clock

PEER_VIEWS = {f"{peer}{', bucket view' if view else ''}": (peer, view) for peer in PEERS for view in (False, True)}


class Machine(NamedTuple):
    """Where to run: on a GPU at full size, or anywhere else with a few parameters, to try the code out."""

    device: str

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def shapes(self, model: str) -> list[Shape]:
        if model == MODELS[0]:
            return large_gpt_shapes() if self.device == "cuda" else [(64, 32)] * 12
        return [(1024,)] * (4000 if self.device == "cuda" else 40)

    def race(self, contestants: dict[str, Run], rounds: int, *, warm: bool = False) -> Times:
        """`warm`: each timed run follows one that is not, so that the host's caches are not full of others' tensors."""
        clock = cuda_clock if self.device == "cuda" else wall_clock

        def warm_clock(run: Run) -> float:
            run()
            return clock(run)

        return race(contestants, rounds, clock=warm_clock if warm else clock)


MODELS = ("GPT 1.3B", "4,000 small")


def alone(machine: Machine, rounds: int) -> list[Row]:
    """World size 1 against the plain optimizer, and against torch's class."""
    rows: list[Row] = []
    for model in MODELS:
        for recipe in ("fused AdamW", "foreach AdamW"):
            (times,) = run_ranks(1, _alone, machine, model, recipe, rounds, backend=machine.backend)
            what = f"step, {model}, 1 rank, {recipe}"
            rows += [row for view in ("", ", bucket view") for row in _rows_alone(what, times, view, machine)]
    return rows


def shares(machine: Machine, rounds: int) -> list[Row]:
    """One rank's share of a step in a large world; `fake` messages cost nothing."""
    rows: list[Row] = []
    for model in MODELS:
        (by_world,) = run_ranks(1, _shares, machine, model, rounds, backend="none")
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


def _alone(machine: Machine, model: str, recipe: str, rounds: int) -> Times:
    shapes = machine.shapes(model)
    grads = _grads(shapes, machine)
    contestants: dict[str, Run] = {}
    for name, (peer, view) in PEER_VIEWS.items():
        params = _params(shapes, machine, grads)
        contestants[name] = RECIPES[recipe].sharded(peer, params, bucket_view=view).step
        if name.startswith("zeroshard"):
            # On the very same parameters: with thousands of them the host's caches decide.
            contestants[name.replace("zeroshard", "plain")] = RECIPES[recipe].plain(params).step
    return machine.race(contestants, rounds)


def _shares(machine: Machine, model: str, rounds: int) -> dict[int, Times]:
    shapes, recipe = machine.shapes(model), RECIPES["fused AdamW"]
    grads = _grads(shapes, machine)
    found: dict[int, Times] = {}
    for world in (8, 64, 512):
        with fake_group(world):
            contestants: dict[str, Run] = {}
            for name, (peer, view) in PEER_VIEWS.items():
                optimizer = recipe.sharded(peer, _params(shapes, machine, grads), bucket_view=view)
                contestants[name] = optimizer.step
                owned = [tuple(param.shape) for group in optimizer.optim.param_groups for param in group["params"]]
            contestants["share"] = recipe.plain(_params(owned, machine, ())).step
            found[world] = machine.race(contestants, rounds)
    return found


def _grads(shapes: list[Shape], machine: Machine) -> list[torch.Tensor]:
    """Gradients that all contestants share, to save memory."""
    return [torch.randn(shape, device=machine.device) * 1e-2 for shape in shapes]


def _params(shapes: list[Shape], machine: Machine, grads: "list[torch.Tensor] | tuple[()]") -> list[torch.Tensor]:
    return make_params(shapes, device=machine.device, grads=grads)
