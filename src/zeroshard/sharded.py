"""`shard`: an optimizer for a whole model, without DDP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .adapters.autograd import GradHooks, hooked_params
from .adapters.module import AveragedOnce, EqualBuffers, Gates, ZeroGrad, let_go
from .assembly import Assembly
from .comm.agreement import agree
from .comm.collectives import Comm
from .comm.rows import Within, comm_of
from .config import ZeroConfig, refuse_policies
from .errors import ConfigError
from .layout.layout import Layout
from .notices import warn_user
from .optimizer import ZeroRedundancyOptimizer
from .params import GivenParams, refuse_distributed
from .rules import Rule, class_names, divide
from .runtime.buffers import describe, make_equal
from .runtime.flat import FlatEngine
from .runtime.fused import with_fused
from .runtime.grad_sync import GradSync
from .runtime.inner import Factory, ParamGroup, Recipe
from .runtime.parts import Kind
from .runtime.team import CLASS
from .units import Rank

if TYPE_CHECKING:
    from .second_copy import Buffers

_MOST_NAMES = 5


def shard(
    model: torch.nn.Module,
    optimizer_class: Factory | Sequence[Rule],
    *,
    params: Any = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    shard_within: Within | None = None,
    config: ZeroConfig | None = None,
    **defaults: Any,
) -> "ShardedOptimizer":
    """An optimizer for `model` of which every rank holds 1/N: of the state, and of the gradients.

    The model is neither wrapped nor changed in what it computes. Its parameters and buffers become those of rank 0, its
    parameters move into flat buffers, and gradients are averaged over the ranks while backward runs. Called on all
    ranks.

    Args:
        model: a module that no `DistributedDataParallel` wraps.
        optimizer_class: the class, or any callable, that makes the optimizer to shard. Or a list of `Rule`s: which
            class updates which parameters.
        params: parameters or groups of them, if not all of the model in one group. Not with rules.
        process_group: the ranks that train together; by default all. All of them share the state, unless `mesh` or
            `shard_within` say otherwise.
        mesh: those ranks, in one dimension along which they share, or in two (replicate, shard): the state is divided
            along the second, and every row has all of it. Gradients are averaged over all ranks in any case.
        shard_within: the same by words: "node" for the ranks of one host, or a number of consecutive ranks.
        config: how to shard.
        defaults: everything else goes to `optimizer_class`. On GPUs the fused implementation is
            taken where torch has one, unless `fused` or `foreach` are given.
    """
    rules = _are_rules(optimizer_class)
    given = _named(model, every_name=rules) if params is None else params
    if rules and params is not None:
        given = _params_and_rules()
    ranks = (mesh, shard_within)
    return ShardedOptimizer(model, given, optimizer_class, process_group, ranks=ranks, config=config, **defaults)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """What `shard` returns. Gradients come from autograd's hooks and are on their way to their owners at once.

    After a backward pass with `stage=2`, the default, `param.grad` is a placeholder that raises when it is used. With
    `stage=1` it is the sum of this rank's own passes. Use `clip_grad_norm_` of this optimizer, and
    `zeroshard.GradScaler`.

    Where rows of ranks hold the same, `rank`, `world_size` and `process_group` are those of this rank's row, as in
    `layout`. The rank that `full_state_dict(to=...)` takes counts in all that train, `join_process_group`.
    """

    engine: FlatEngine
    _default_stage = 2

    def __init__(
        self,
        model: torch.nn.Module,
        params: Any,
        optimizer_class: Any,
        process_group: dist.ProcessGroup | None,
        *,
        ranks: tuple[DeviceMesh | None, Within | None] = (None, None),
        config: ZeroConfig | None,
        **defaults: Any,
    ) -> None:
        self._model, self._ranks = model, ranks
        self._rules = list(optimizer_class) if _are_rules(optimizer_class) else []
        super().__init__(params, optimizer_class, process_group, config=config, **defaults)
        self.engine.waits = not self._config.overlap_gather
        self._grad_sync = GradSync(
            self._comm, self._config._stage_policy, self._config._reduce_policy, self._config._master_policy
        )
        self.engine.reduce_by(self._grad_sync)
        self.engine.broadcast(Rank(0))
        self._looks_for_strays = not self._comm.is_alone
        self._hooks = GradHooks(self._grad_sync)
        self._hooks.attach(self.engine.params)
        self._attach_to_model(model)

    def _attach_to_model(self, model: torch.nn.Module) -> None:
        self._buffers = EqualBuffers(self._comm.everyone, model, self._passes_keep_buffers, self._is_accumulating)
        self._buffers.sync(Rank(0))
        others = [param for param in model.parameters() if id(param) not in self.engine.bucket_of]
        make_equal(self._comm.everyone, others, Rank(0))
        self._averaged_once = AveragedOnce(model, self.engine, self._hooks)
        self._gates = Gates(model, self.engine) if self._config.overlap_gather else None
        vars(model)["zero_grad"] = ZeroGrad(model, self._clear_grads)

    @property
    def _is_superseded(self) -> bool:
        hooks = vars(self).get("_hooks")  # not there before it is made
        return hooks is not None and hooks.is_replaced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside no gradients are sent: backward passes add up gradients in `param.grad`, in full size.

        The next pass outside, or the next step, sends the sum. Without it every pass is reduced, and with `stage=2`
        gradients never take more than 1/N.

        Buffers follow DDP: all passes up to the next one outside use those that the first of them has got. So after a
        step a rank may run the model alone here; without gradients it may anywhere. Right after a pass outside whose
        step is yet to come, the first pass inside broadcasts the buffers of rank 0, which all ranks must take part in.
        """
        before, self._grad_sync.paused = self._grad_sync.paused, True
        try:
            yield
        finally:
            self._grad_sync.paused = before

    def wait(self) -> None:
        """All parameters have arrived. Needed with `overlap_gather` only, before parameters are read directly."""
        if self._gates is not None:
            self._gates.wait()

    def _add_groups(self, call: str, groups: Any) -> None:
        self.engine.settle(call, self.param_groups)  # gradients in flight belong to the present buckets
        known = len(self.engine.layout.buckets)
        super()._add_groups(call, groups)
        self.engine.broadcast(Rank(0), first_bucket=known)
        self._hooks.attach(self.engine.params)
        if self._gates is not None:
            self._gates.find_params()

    def _read_groups(self, groups: Any) -> list[ParamGroup]:
        """With the names that parameters have in the model, if our other groups have names."""
        new = super()._read_groups(groups)
        if "param_names" not in self.param_groups[0]:
            return new
        names = {id(param): name for name, param in self._model.named_parameters()}
        start = len(self.engine.params)
        for group in new:
            entries = enumerate(group["params"], start)
            start += len(group["params"])
            group["params"] = [
                (names.get(id(it), f"added.{i}"), it) if isinstance(it, torch.Tensor) else it for i, it in entries
            ]
        return new

    def _step(self, closure: Any, kwargs: dict[str, Any], *, joined: bool) -> Any:
        self._require_not_replaced("step")
        try:
            result = super()._step(closure, kwargs, joined=joined)
            if self._looks_for_strays:  # once, and not before now: another optimizer may have been made for them
                self._looks_for_strays = False
                _warn_of_strays(self._model)
            return result
        finally:
            self._hooks.attach(self.engine.params)  # also those that have been thawed since
            if self._gates is not None and self.engine.sync.under_way:
                self._gates.close()

    def _spread_grads(self, call: str, given: Callable[[], list[str]] = list) -> list[torch.Tensor] | None:
        # Those that were unfrozen since the last step, too: the next pass may add to what is clipped or unscaled now.
        self._hooks.attach(self.engine.params)
        return super()._spread_grads(call, given)

    def _comm_of(self, process_group: dist.ProcessGroup | None) -> Comm:
        return comm_of(process_group, *self._ranks)

    def _read(self, params: Any) -> GivenParams:
        if isinstance(self._model, DistributedDataParallel):
            raise ConfigError(
                "shard() reduces gradients itself: give it the model without DistributedDataParallel. To keep that, "
                "use ZeroRedundancyOptimizer(..., config=ZeroConfig(partition=FlatShards())) and its ddp_hook()."
            )
        if isinstance(self._model, torch.nn.Module):
            let_go(self._model)
        if not self._rules:
            return super()._read(params)
        _check_rules(self._rules)
        chosen = divide(super()._read(params).groups[0]["params"], self._rules)
        names = class_names(self._rules)
        return GivenParams([{"params": it, CLASS: name} for it, name in zip(chosen, names, strict=True)], plain=True)

    def _kinds(
        self, optimizer_class: Any, defaults: dict[str, Any], given: GivenParams, *, overlap: bool
    ) -> list[Kind]:
        if not self._rules:
            (kind,) = super()._kinds(optimizer_class, defaults, given, overlap=overlap)
            return [Kind(kind.name, with_fused(kind.recipe))]
        if defaults:
            raise ConfigError(f"with rules, options belong into one: Rule(..., {next(iter(defaults))}=...)")
        return [
            Kind(group[CLASS], with_fused(Recipe(rule.optimizer_class, [group], True, rule.options)), rule.partition)
            for rule, group in zip(self._rules, self.param_groups, strict=True)
        ]

    def _assembly_of(self, kinds: list[Kind], overlap: bool) -> Assembly:
        for name, tensor in self._others().items():
            refuse_distributed(name, tensor)
        order = {id(param): place for place, param in enumerate(self._model.parameters())}
        return Assembly(self._comm, self._config, kinds, overlap=overlap, reduces=True, order=order)

    def _facts(self, layout: Layout) -> list[str]:
        return [*super()._facts(layout), *describe(self._comm.everyone, self._others())]

    def _others(self) -> dict[str, torch.Tensor]:
        """What the model has beside our parameters."""
        ours = {id(param) for group in self.param_groups for param in group["params"]}
        foreign = {name: param for name, param in self._model.named_parameters() if id(param) not in ours}
        return foreign | {f"buffer {name}": buffer for name, buffer in self._model.named_buffers()}

    def model_buffers(self) -> "Buffers":
        return dict(self._model.named_buffers())

    def before_uneven_step(self, source: Rank) -> None:
        self._buffers.sync(source)

    def after_step(self) -> None:
        if not self._keeps_buffers():
            self._buffers.sync(Rank(0))  # for the next passes, also those without gradients, which send nothing
        super().after_step()

    def sync_buffers(self) -> None:
        """Buffers become those of rank 0 now, for instance after passes without gradients that have changed them.

        Called on all ranks, and not inside `Join`.
        """
        self._require_not_replaced("sync")
        agree(self._comm, "sync_buffers", ())
        self._buffers.sync(Rank(0))

    def _passes_keep_buffers(self) -> bool:
        """So that one rank may make the forward pass that is next alone."""
        return not torch.is_grad_enabled() or self._keeps_buffers()

    def _is_accumulating(self) -> bool:
        return self._grad_sync.paused

    def _require_not_replaced(self, verb: str) -> None:
        if self._hooks.is_replaced:
            raise RuntimeError(f"another optimizer was made by shard() for parameters of this one: {verb} that one")

    def _keeps_buffers(self) -> bool:
        replaced = self._hooks.is_replaced  # the ranks of this one need no longer be there
        return replaced or not self._config.sync_buffers or self._join_config.enable

    def _clear_grads(self, set_to_none: bool) -> None:
        self.engine.clear_grads(to_none=set_to_none)


def _are_rules(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given)


def _check_rules(rules: Sequence[Rule]) -> None:
    strange = [it for it in rules if not isinstance(it, Rule)]
    if strange:
        raise TypeError(f"a list for shard() holds Rule(...)s only, not {strange[0]!r}")
    for rule in rules:
        refuse_policies(rule.optimizer_class, rule.options)


def _params_and_rules() -> Iterator[Any]:
    """Raises when it is read, with all ranks."""
    raise ConfigError("rules choose among all parameters of the model: shard() takes either them or params")
    yield


def _warn_of_strays(model: torch.nn.Module) -> None:
    """Tell of parameters that have gradients which are averaged by nobody, as far as this rank can see."""
    wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    averaged = hooked_params() | {id(param) for part in wrapped for param in part.parameters()}
    candidates = ((name, param) for name, param in model.named_parameters() if id(param) not in averaged)
    strays = [name for name, param in candidates if param.requires_grad and param.grad is not None]
    if strays:
        shown = ", ".join(strays[:_MOST_NAMES]) + (", ..." if len(strays) > _MOST_NAMES else "")
        warn_user(
            f"nobody averages the gradients of {len(strays)} parameters of the model, since no group of a sharded "
            f"optimizer has them: {shown}. Ranks that train them would drift apart. Put them into the params of "
            "shard(), freeze them with requires_grad_(False), or average their gradients yourself."
        )


def _named(model: torch.nn.Module, *, every_name: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Read only when all ranks are about to agree: what is wrong on one is then raised on all.

    `every_name`: also the second of a tied weight.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"shard() takes a torch.nn.Module, not a {type(model).__name__}: pass the model, and groups as params=..."
        )
    yield from model.named_parameters(remove_duplicate=not every_name)
