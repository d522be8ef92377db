"""From what the user gave to an engine that runs it. Everything here is local to the rank, and no value changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch

from .comm.collectives import Comm
from .config import ZeroConfig
from .dividing import Division, refuse_differentiable
from .errors import ConfigError
from .layout.balance import Balance
from .layout.layout import Layout
from .layout.specs import ParamSpec, read_specs
from .notices import warn_user
from .params import check_specs
from .runtime.flat import FlatEngine, Share
from .runtime.inner import ParamGroup
from .runtime.looks import Looks
from .runtime.offload import is_far
from .runtime.parts import Kind
from .runtime.step import Engine
from .runtime.store import FlatStore, LooseStore
from .runtime.team import CLASS
from .runtime.whole import WholeEngine
from .state.compat import describe_groups


@dataclass(frozen=True)
class Assembly:
    """The choices that stay, and how they turn groups of parameters into a layout and an engine."""

    comm: Comm
    config: ZeroConfig
    kinds: Sequence[Kind]
    """Of optimizers. Where there are several, each group names its own."""
    bucket_view: bool = False
    """Whole parameters shall live in flat buffers."""
    overlap: bool = False
    """DDP shall drive the steps."""
    reduces: bool = False
    """Gradients are to be reduced to their owners, so that parameters lie in buckets in any case."""
    order: Mapping[int, int] = field(default_factory=dict)
    """Places of parameters in the model, by id, if that is known."""

    @cached_property
    def division(self) -> Division:
        """Who owns what."""
        return Division(self.config, self.kinds, reduces=self.reduces, offloads=self._offloads)

    def _kinds_of(self, groups: Sequence[ParamGroup]) -> list[int]:
        """The number of each group's kind."""
        return [0] * len(groups) if len(self.kinds) == 1 else [self._kind_of(group) for group in groups]

    def _kind_of(self, group: ParamGroup) -> int:
        names = [kind.name for kind in self.kinds]
        if group.get(CLASS) not in names:
            raise ConfigError(
                f"this optimizer has several classes, so that a group must name its own: {CLASS!r} is to be one of "
                f"{names}, not {group.get(CLASS)!r}"
            )
        return names.index(group[CLASS])

    def extend(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> Layout:
        """`layout` with the groups from `first_group` on, once they are found fit to be sharded."""
        specs = read_specs(groups[first_group:], first_index=len(layout.params), first_group=first_group)
        mixed = self.config.mixed_dtypes or self.reduces
        known = len(layout.params)
        check_specs([*layout.params, *specs], all_params(groups), mixed_dtypes=mixed, known=known)
        for device in {spec.device for spec in specs}:
            if not self.comm.group.carries(device):
                raise ConfigError(f"the backend of the process group cannot carry parameters on {device}")
        ordered = self._in_order_of_use(specs, groups) if self.division.flat else specs
        return self.division.divide(layout, ordered, self._kinds_of(groups))

    def balance(self, layout: Layout, groups: Sequence[ParamGroup]) -> Balance:
        """Of trained elements, and of what it takes to update them."""
        return self.division.balance(layout, self._kinds_of(groups))

    def _in_order_of_use(self, specs: Sequence[ParamSpec], groups: Sequence[ParamGroup]) -> list[ParamSpec]:
        """As a forward pass is expected to use them: in the order of the model or, where that is not known, all groups
        side by side. With one group behind the other, a bucket of all biases would be full, and let others go, last."""
        if not self.order:
            return _side_by_side(specs)
        params, last = all_params(groups), len(self.order)
        return sorted(specs, key=lambda spec: self.order.get(id(params[spec.index]), last))

    def engine(self) -> Engine:
        """One for this rank, which is to `prepare` next."""
        engine = self._engine()
        engine.looks = Looks(self.comm, self.config.drift, self.config.nonfinite)
        return engine

    def prepare(self, engine: Engine, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """It is to `extend` to `layout` next, or to take back what it has got ready for that."""
        engine.prepare(layout, groups)
        self._check(engine)
        engine.move_params(layout, groups)  # not before: what this rank refuses by itself leaves them where they are

    def warn_of_whole_params(self) -> None:
        """Say so where parameters would be cut if the optimizer allowed it. After one was made, and so can be made."""
        (kind, *others) = self.kinds
        if self.reduces and self.config.partition is None and not others and not kind.cutting:
            warn_user(
                f"{kind.name} looks at whole parameters, so each is updated by one rank: shards are as "
                "balanced as the sizes of parameters allow"
            )

    @cached_property
    def _offloads(self) -> bool:
        groups = [group for kind in self.kinds for group in kind.recipe.groups]
        return self.config.offload is not None and any(is_far(param.device) for param in all_params(groups))

    def warn_of_offload(self) -> None:
        """Say so where it has no effect."""
        if self.config.offload is not None and not self._offloads:
            warn_user("Offload(...) has no effect: no parameter is on a GPU, so that state is in host memory anyway")

    def _check(self, engine: Engine) -> None:
        """Refuse options of an optimizer that cannot be right when it is sharded."""
        if self._offloads and any(member.has_mode("train") for member in engine.inner.members):
            raise ConfigError(
                "optimizers with train() and eval() cannot be used with Offload(...): what they exchange with the "
                "parameters would be in host memory"
            )
        refuse_differentiable([group for member in engine.inner.members for group in member.optimizer.param_groups])

    def check_options(self) -> None:
        """Refuse an optimizer that cannot be right when it is sharded, and options that do not go together."""
        self.division.check_kinds()
        if self.overlap and self.division.flat:
            raise ConfigError("overlap_with_ddp=True deals out whole parameters: with FlatShards() use ddp_hook()")
        if self.overlap and self.config.second_copy is not None:
            raise ConfigError("SecondCopy(...) needs step() to be called, and with overlap_with_ddp=True a hook steps")
        for name in ("master_dtype", "offload"):
            if getattr(self.config, name) is not None and not self.division.flat:
                raise ConfigError(f"ZeroConfig({name}=...) needs partition=FlatShards()")
        looking = {"Drift": self.config.drift, "NonFinite": self.config.nonfinite}
        for name in (name for name, it in looking.items() if it is not None and self.overlap):
            raise ConfigError(f"{name}(...) cannot be used with overlap_with_ddp=True: DDP's hook makes the steps")
        self._refuse_what_would_be_ignored()

    def _refuse_what_would_be_ignored(self) -> None:
        if self.config.stage == 2 and not self.reduces:
            raise ConfigError(
                "ZeroRedundancyOptimizer is ZeRO-1: DDP keeps whole gradients, so ZeroConfig(stage=2) has no effect. "
                "Use zeroshard.shard(model, ...) for ZeRO-2."
            )
        if self.config.overlap_gather and not self.reduces:
            raise ConfigError("overlap_gather=True needs to see the model: use zeroshard.shard(model, ...)")
        if not self.config.sync_buffers and not self.reduces:
            raise ConfigError("sync_buffers=False is for zeroshard.shard; DDP has broadcast_buffers=False")
        for name in ("reduce_dtype", "deterministic_reduce"):
            if getattr(self.config, name) and not self.division.flat:
                raise ConfigError(
                    f"ZeroConfig({name}=...) needs partition=FlatShards() and ddp_hook(): by default DDP reduces"
                )

    def facts(self, layout: Layout, groups: Sequence[ParamGroup]) -> list[str]:
        """What must be equal on all ranks, most telling first, each in a line of its own."""
        return [
            *(f"optimizer class {kind.name}" for kind in self.kinds),
            *self.config.describe(),
            f"parameters_as_bucket_view={self.bucket_view}",
            f"overlap_with_ddp={self.overlap}",
            *self.facts_of_new(Layout.empty(layout.world_size), layout, groups),
        ]

    def facts_of_new(
        self, base: Layout, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0
    ) -> list[str]:
        """The same of what `layout` has beyond `base`: the groups from `first_group` on."""
        return [
            *(spec.describe() for spec in layout.params[len(base.params) :]),
            "no further parameter",
            *describe_groups(groups[first_group:], first=first_group),
            f"layout {layout.digest}",
        ]

    def _engine(self) -> Engine:
        if self.division.flat:
            shares = [Share(kind, self.division.is_cut(number)) for number, kind in enumerate(self.kinds)]
            return FlatEngine(
                self.comm, shares, self.config._master_policy, self.config.offload if self._offloads else None
            )
        store = FlatStore(by_owner=True) if self.bucket_view and not self.overlap else LooseStore()
        return WholeEngine(self.comm, self.kinds[0], store)


def _side_by_side(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """First those at the head of each group, at last those at its end."""
    members = [list(group) for _, group in groupby(specs, key=lambda spec: spec.group)]
    place = {it.index: (number + 0.5) / len(group) for group in members for number, it in enumerate(group)}
    return sorted(specs, key=lambda spec: place[spec.index])


def count_params(groups: Sequence[ParamGroup]) -> str:
    """How many there are, in words."""
    params, several = len(all_params(groups)), "s" if len(groups) > 1 else ""
    return f"{params} parameters in {len(groups)} group{several}"


def all_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
