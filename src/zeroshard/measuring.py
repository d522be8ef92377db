"""What a step on each of a model's matrices costs, measured."""

import struct
from typing import Any

import torch
import torch.distributed as dist

from .comm.consensus import Prepared, prepare_all
from .comm.collectives import Comm
from .comm.process_group import Group
from .errors import ConfigError
from .layout.spec import ParamSpec, make_param_specs
from .rules import Selector, matrix_params, select_params
from .engine.fused import enable_fused
from .engine.inner import OptimizerConstructor, OptimizerFactory
from .engine.work import MeasuredCost, cost_key, measure_step_seconds
from ._types import Rank


def profile_step_cost(
    model: torch.nn.Module,
    optimizer_class: OptimizerConstructor,
    *,
    selector: Selector | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> MeasuredCost:
    """What it takes `optimizer_class` to step each parameter that `selector` chooses, for `WholeParams(cost=...)`.

    Rank 0 times steps on tensors like them, one of each shape, where the model is, and all ranks get its seconds.
    Nothing of the model changes. Called on all ranks, when the devices have nothing else to do.

    Args:
        model: the model that will be given to `shard`.
        optimizer_class: as in a `ParamRule`.
        selector: as in a `ParamRule`; by default `matrix_params()`.
        process_group: the ranks that will share the work; by default all.
        options: everything else goes to `optimizer_class`.
    """
    comm = Comm(Group(process_group))

    def prepare() -> Prepared[tuple[list[ParamSpec], list[float]]]:
        params = _select_model_params(model, selector or matrix_params())
        found = list({cost_key(spec): spec for spec in make_param_specs([{"params": params}])}.values())
        recipe = enable_fused(OptimizerFactory(optimizer_class, [{"params": params}], True, options))
        times = [measure_step_seconds(recipe, spec) for spec in found] if comm.group.rank == 0 else []
        return Prepared((found, times), [f"{spec.shape} {spec.dtype} on {spec.device.type}" for spec in found])

    found, times = prepare_all(comm, "profile_step_cost", prepare)
    data = comm.broadcast_bytes(struct.pack(f"{len(times)}d", *times) if times else None, Rank(0))
    measured = struct.unpack(f"{len(found)}d", data)
    return MeasuredCost(dict(zip(map(cost_key, found), measured, strict=True)))


def _select_model_params(model: torch.nn.Module, selector: Selector) -> list[torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"profile_step_cost() takes a torch.nn.Module, not a {type(model).__name__}")
    chosen = [param for _, param in select_params(selector, model.named_parameters(remove_duplicate=False))]
    if not chosen:
        raise ConfigError(f"{selector!r} chooses no parameter of the model, so that there is nothing to measure")
    return chosen
