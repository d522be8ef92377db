"""`ZeroRedundancyOptimizer`: wires the parts together and delegates."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from .adapters.ddp import Overlap, plain_class
from .adapters.join import Lender, ShadowStep
from .checkpoint import compat
from .checkpoint.compat import StateDict
from .checkpoint.exchange import gather
from .comm.agreement import agree
from .comm.collectives import Comm
from .comm.group import Group
from .config import ZeroConfig
from .errors import ConfigError
from .layout.layout import Layout
from .layout.partition import Partitioner
from .layout.specs import read_specs
from .params import check_specs, read_group, read_params
from .runtime import amp
from .runtime.inner import Factory, ParamGroup, Recipe
from .runtime.selftest import examine
from .runtime.step import Engine
from .runtime.store import FlatStore, LooseStore
from .units import GlobalRank, Rank


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose state exists once across all ranks instead of once on each.

    Each rank updates the parameters it owns with its own instance of `optimizer_class` and sends them to the
    others. Parameters come out bit for bit as the unsharded optimizer would have made them of the same
    gradients, which must be equal on all ranks, as `DistributedDataParallel` makes them.

    Constructing, stepping, adding groups, loading and consolidating are collective: call them on all ranks of
    the group in the same order. Ranks that disagree raise `RankMismatchError`; what fails on one rank is
    raised on all.

    Args:
        params: parameters, named parameters, or dicts of them with options, as any torch optimizer takes them.
        optimizer_class: the class, or any callable, that makes the optimizer to shard.
        process_group: the ranks to shard over; by default all.
        parameters_as_bucket_view: keep parameters in flat buffers, so that a step copies nothing.
        overlap_with_ddp: step inside the backward pass, driven by a hook of `zeroshard.ddp_hooks`.
        config: options beyond torch's signature.
        defaults: everything else goes to `optimizer_class`.
    """

    # GradScaler then calls `step` on every rank, also where this rank's gradients are not finite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer_class: Factory,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        config: ZeroConfig | None = None,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self.initialized = False
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._comm = Comm(Group(process_group))
        self._config = config or ZeroConfig()
        self._overlap: Overlap | None = None
        self._snapshot: _Snapshot | None = None
        built, failure = None, None
        try:
            self._recipe = self._read_recipe(params, optimizer_class, overlap_with_ddp, defaults)
            built = self._build(self._config.partition, flat=parameters_as_bucket_view and not overlap_with_ddp)
            self.defaults = built.engine.inner.optimizer.defaults
            built.engine.inner.pull(self.param_groups)
        except Exception as error:
            failure = error
        agree(
            self._comm,
            f"making a {type(self).__name__}",
            () if built is None else self._facts(built.layout),
            failure,
        )
        assert built is not None
        self._adopt(built)
        self._lender = Lender(self._comm, self._owned_params)
        if overlap_with_ddp:
            self._overlap = Overlap(self._comm, self._repartition, self.param_groups)
            if parameters_as_bucket_view:
                warnings.warn("parameters_as_bucket_view has no effect with overlap_with_ddp=True", stacklevel=2)
        self.initialized = True

    # ---- what it is made of

    @property
    def optim(self) -> Optimizer:
        """This rank's inner optimizer, an instance of the given class."""
        return self._engine.inner.optimizer

    @property
    def state(self) -> Any:
        """This rank's optimizer state, by parameter: the one copy there is."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        if self.initialized:
            self.optim.state = value

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._comm.group.process_group

    @property
    def world_size(self) -> int:
        return self._comm.group.size

    @property
    def rank(self) -> Rank:
        """This process's rank in the group."""
        return self._comm.group.rank

    @property
    def global_rank(self) -> GlobalRank:
        return self._comm.group.global_rank

    @property
    def layout(self) -> Layout:
        """Which rank owns which parameter."""
        return self._engine.layout

    @property
    def overlap(self) -> Overlap:
        """What drives this optimizer from inside DDP's backward."""
        if self._overlap is None:
            raise ConfigError(
                "this optimizer steps when step() is called; construct it with overlap_with_ddp=True "
                "to have a DDP hook step it"
            )
        return self._overlap

    # ---- training

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and bring everyone's updates to all ranks.

        Returns what the inner optimizer's step returned. `closure` and `kwargs` are handed on to it.
        """
        if self._overlap is not None:
            self._overlap.check_trainable()
            warnings.warn("step() does nothing with overlap_with_ddp=True: the DDP hook makes the steps", stacklevel=3)
            return None
        Join.notify_join_context(self)
        return self._step(closure, kwargs, joined=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._overlap is not None:
            self._overlap.check_trainable()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group in the middle of training, on all ranks. No earlier parameter changes its owner."""
        if not self.initialized:
            super().add_param_group(param_group)
            return
        if self._overlap is not None:
            raise RuntimeError("parameter groups cannot be added with overlap_with_ddp=True: DDP's buckets are fixed")
        known = len(self.param_groups)
        grown, failure = None, None
        try:
            super().add_param_group(read_group(param_group))
            grown = self._grow(known)
        except Exception as error:
            failure = error
        try:
            agree(self._comm, "add_param_group", () if grown is None else self._facts(grown), failure)
        except BaseException:
            del self.param_groups[known:]
            if grown is not None:
                self._engine.inner.drop_last_group()
            raise
        assert grown is not None
        self._engine.extend(grown, self.param_groups[known]["params"])

    def join_hook(self, **_: Any) -> JoinHook:
        """For `torch.distributed.algorithms.join.Join`."""
        return ShadowStep(lambda: self._step(None, {}, joined=True))

    @property
    def join_device(self) -> torch.device:
        return self._engine.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # ---- state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all state on rank `to` of the group, for `state_dict()` there. Called on all ranks."""
        contents = self._gathered("consolidate_state_dict", to)
        if contents is not None:
            self._snapshot = _Snapshot(contents, self._engine.steps)

    def full_state_dict(self, to: int = 0) -> StateDict | None:
        """Gather all state and return it on rank `to`, None on the others. Called on all ranks; nothing is kept."""
        contents = self._gathered("full_state_dict", to)
        return None if contents is None else self._through_hooks(contents)

    def state_dict(self) -> StateDict:
        """What `consolidate_state_dict` gathered on this rank, in the format of the unsharded optimizer."""
        self._require_settled("state_dict")
        if self._snapshot is None:
            raise RuntimeError(
                f"rank {self.rank} holds only its own share of the state: call consolidate_state_dict(to={self.rank}) "
                "on all ranks first, or full_state_dict()"
            )
        since = self._engine.steps - self._snapshot.steps
        if since:
            warnings.warn(
                f"state_dict() returns the state of {since} steps ago: call consolidate_state_dict() on all ranks "
                "again for the present one",
                stacklevel=2,
            )
        return self._through_hooks(self._snapshot.contents)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take this rank's part of a dict saved at any world size, or by the plain optimizer. Called on all ranks.

        Either all ranks load it or none does. The dict stays as it is.
        """
        self._require_settled("load_state_dict")
        facts: list[str] = []
        undo, failure = None, None
        try:
            state_dict = self._pre_load(dict(state_dict))
            saved = compat.read(state_dict, self.layout.params, self._traits.param_shaped)
            facts = saved.facts()
            undo = self._engine.inner.load(compat.local_dict(saved, self._owned_by_group()))
        except Exception as error:
            failure = error
        try:
            agree(self._comm, "load_state_dict", facts, failure)
        except BaseException:
            if undo is not None:
                undo()
            raise
        self._engine.inner.pull(self.param_groups)
        self._snapshot = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it is one part of an optimizer that lives on "
            f"{self.world_size} ranks. Save full_state_dict() and load it into a new one."
        )

    # ---- how it is put together

    def _read_recipe(self, params: Any, optimizer_class: Factory, overlap: bool, defaults: dict[str, Any]) -> Recipe:
        """Check everything the user gave, before any of it is used."""
        if not isinstance(self._config, ZeroConfig):
            raise TypeError(f"config must be a ZeroConfig, not {type(self._config).__name__}")
        given = read_params(params)
        Optimizer.__init__(self, given.groups, {})
        self._check_params(0)
        recipe = Recipe(plain_class(optimizer_class, overlap=overlap), self.param_groups, given.plain, defaults)
        self._traits = examine(recipe)
        if self._traits.couples_params:
            raise ConfigError(
                f"{recipe.name} cannot be sharded: its update of one parameter depends on the others, "
                "which live on other ranks"
            )
        return recipe

    def _build(self, partition: Partitioner, *, flat: bool) -> "_Built":
        """An engine for this rank, and the layout that it shall take in. Changes no parameter."""
        layout = partition.extend(Layout.empty(self.world_size), read_specs(self.param_groups))
        inner = self._recipe.build(self._owned_ids(layout))
        return _Built(Engine(self._comm, inner, FlatStore() if flat else LooseStore()), layout)

    def _adopt(self, built: "_Built") -> None:
        self._engine = built.engine
        self._engine.extend(built.layout, _params(self.param_groups))

    def _repartition(self, partition: Partitioner) -> Engine:
        """Start afresh with other owners, before there is any state."""
        self._adopt(self._build(partition, flat=False))
        return self._engine

    def _grow(self, known: int) -> Layout:
        """The layout with group number `known`; the inner optimizer has it already. No parameter has changed."""
        self._check_params(known)
        group, old = self.param_groups[known], self.layout
        specs = read_specs([group], first_index=len(old.params), first_group=known)
        layout = self._config.partition.extend(old, specs)
        self._engine.inner.add_group(group, self._owned_ids(layout))
        self._engine.inner.pull(self.param_groups)
        return layout

    def _check_params(self, known: int) -> None:
        new = _params(self.param_groups[known:])
        check_specs(read_specs(self.param_groups), new, mixed_dtypes=self._config.mixed_dtypes)
        for device in {param.device for param in new}:
            if not self._comm.group.carries(device):
                raise ConfigError(
                    f"the process group cannot carry parameters on {device.type}; its backend is another's"
                )
        if any(group.get("differentiable") for group in self.param_groups):
            raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")

    def _owned_params(self, rank: Rank) -> dict[int, torch.Tensor]:
        return self._engine.owned(rank)

    def _owned_ids(self, layout: Layout) -> set[int]:
        params = _params(self.param_groups)
        return {id(params[index]) for index in layout.owned_by(self.rank)}

    def _facts(self, layout: Layout) -> list[str]:
        """What must be equal on all ranks, most telling first."""
        settings = f"{self._recipe.name}, {self._config}, parameters_as_bucket_view={self.parameters_as_bucket_view}"
        specs = [spec.describe() for spec in layout.params]
        groups = [f"options of group {i}: {compat.describe_options(g)}" for i, g in enumerate(self.param_groups)]
        return [settings, f"{len(groups)} groups", *specs, *groups, f"layout {layout.digest}"]

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, joined: bool) -> Any:
        uneven = self._join_config.enable and self.world_size > 1
        if uneven:
            self._lender.before_step(joined=joined)
        try:
            if amp.skips(self, self.optim, self._engine.params, self._comm):
                return None
            return self._engine.run(self.param_groups, closure, kwargs)
        finally:
            amp.forget(self.optim)
            if uneven:
                self._lender.after_step(joined=joined)

    def _gathered(self, call: str, to: int) -> StateDict | None:
        self._require_settled(call)
        index = {id(param): i for i, param in enumerate(self._engine.params)}
        mine: dict[str, dict[Any, Any]] = {"params": {}, "others": {}}
        for key, value in self.state.items():
            if isinstance(key, torch.Tensor):
                mine["params"][index[id(key)]] = value
            else:
                mine["others"][key] = value
        facts = [f"options of group {i}: {compat.describe_options(g)}" for i, g in enumerate(self.param_groups)]
        shares = gather(self._comm, call, facts, mine, Rank(to))
        if shares is None:
            return None
        state = dict(sorted(item for share in shares for item in share["params"].items()))
        others = {key: value for share in reversed(shares) for key, value in share["others"].items()}
        return {"state": {**state, **others}, "param_groups": compat.write_groups(self.param_groups)}

    def _through_hooks(self, contents: StateDict) -> StateDict:
        """A copy of the dicts (not of the tensors) that the state-dict hooks have seen."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result: StateDict = {
            "state": {
                key: dict(value) if isinstance(value, dict) else value for key, value in contents["state"].items()
            },
            "param_groups": [dict(group) for group in contents["param_groups"]],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def _pre_load(self, state_dict: StateDict) -> StateDict:
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def _owned_by_group(self) -> list[list[int]]:
        owned: list[list[int]] = [[] for _ in self.param_groups]
        for index in self.layout.owned_by(self.rank):
            owned[self.layout.params[index].group].append(index)
        return owned

    def _require_settled(self, call: str) -> None:
        if self._overlap is not None and not self._overlap.settled:
            raise RuntimeError(
                f"{call}() needs to know who owns what, and DDP's buckets settle only in its first backward passes: "
                f"call it after {self._overlap.warmup_passes} of them"
            )


class _Snapshot(NamedTuple):
    contents: StateDict
    steps: int


class _Built(NamedTuple):
    engine: Engine
    layout: Layout


def _params(groups: list[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
