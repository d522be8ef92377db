"""What a step on each of a model's matrices costs, measured."""

import struct
from typing import Any

import torch
import torch.distributed as dist

from .comm.agreement import Proposal, agreed
from .comm.collectives import Comm
from .comm.group import Group
from .errors import ConfigError
from .layout.specs import ParamSpec, read_specs
from .rules import Selector, chosen_by, matrices
from .runtime.fused import with_fused
from .runtime.inner import Factory, Recipe
from .runtime.work import MeasuredWork, kind_of, seconds
from .units import Rank


def measure_cost(
    model: torch.nn.Module,
    optimizer_class: Factory,
    *,
    selector: Selector | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> MeasuredWork:
    """What it takes `optimizer_class` to step each parameter that `selector` chooses, for `WholeParams(cost=...)`.

    Rank 0 times steps on tensors like them, one of each shape, where the model is, and all ranks get its seconds.
    Nothing of the model changes. Called on all ranks, when the devices have nothing else to do.

    Args:
        model: the model that will be given to `shard`.
        optimizer_class: as in a `Rule`.
        selector: as in a `Rule`; by default `matrices()`.
        process_group: the ranks that will share the work; by default all.
        options: everything else goes to `optimizer_class`.
    """
    comm = Comm(Group(process_group))

    def propose() -> Proposal[tuple[list[ParamSpec], list[float]]]:
        params = _chosen(model, selector or matrices())
        found = list({kind_of(spec): spec for spec in read_specs([{"params": params}])}.values())
        recipe = with_fused(Recipe(optimizer_class, [{"params": params}], True, options))
        times = [seconds(recipe, spec) for spec in found] if comm.group.rank == 0 else []
        return Proposal((found, times), [f"{spec.shape} {spec.dtype} on {spec.device.type}" for spec in found])

    found, times = agreed(comm, "measure_cost", propose)
    data = comm.broadcast_bytes(struct.pack(f"{len(times)}d", *times) if times else None, Rank(0))
    measured = struct.unpack(f"{len(found)}d", data)
    return MeasuredWork(dict(zip(map(kind_of, found), measured, strict=True)))


def _chosen(model: torch.nn.Module, selector: Selector) -> list[torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"measure_cost() takes a torch.nn.Module, not a {type(model).__name__}")
    chosen = [param for _, param in chosen_by(selector, model.named_parameters(remove_duplicate=False))]
    if not chosen:
        raise ConfigError(f"{selector!r} chooses no parameter of the model, so that there is nothing to measure")
    return chosen
