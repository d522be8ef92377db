"""From what the user gave to an engine that runs it. Everything here is local to the rank and changes no parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .checkpoint.compat import describe_groups
from .comm.collectives import Comm
from .config import ZeroConfig
from .errors import ConfigError
from .layout.layout import Layout
from .layout.specs import read_specs
from .params import check_specs
from .runtime.inner import ParamGroup, Recipe, ShardOptimizer
from .runtime.selftest import Traits, examine
from .runtime.step import Engine
from .runtime.store import FlatStore, LooseStore


@dataclass(frozen=True)
class Assembly:
    """The choices that stay, and how they turn groups of parameters into a layout and an engine."""

    comm: Comm
    config: ZeroConfig
    recipe: Recipe
    flat: bool
    """Parameters shall live in flat buffers."""
    overlap: bool
    """DDP shall drive the steps."""

    @cached_property
    def traits(self) -> Traits:
        """What the self-test finds."""
        return examine(self.recipe)

    def extend(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> Layout:
        """`layout` with the groups from `first_group` on, once they are found fit to be sharded."""
        specs = read_specs(groups[first_group:], first_index=len(layout.params), first_group=first_group)
        check_specs([*layout.params, *specs], all_params(groups), mixed_dtypes=self.config.mixed_dtypes)
        for device in {spec.device for spec in specs}:
            if not self.comm.group.carries(device):
                raise ConfigError(f"the backend of the process group cannot carry parameters on {device}")
        return self.config.partition.extend(layout, specs)

    def engine(self, layout: Layout, groups: Sequence[ParamGroup]) -> Engine:
        """An engine for this rank, which is to `extend` to `layout` next."""
        inner = self.recipe.build(self.owned_ids(layout, groups))
        self.check(inner)
        store = FlatStore() if self.flat else LooseStore()
        return Engine(self.comm, inner, store, moves_all=self.traits.moves_without_grads)

    def check(self, inner: ShardOptimizer) -> None:
        """Refuse an optimizer, or options of it, that cannot be right when it is sharded."""
        if self.traits.couples_params:
            raise ConfigError(
                f"{self.recipe.name} cannot be sharded: its update of one parameter depends on the others, "
                "which live on other ranks"
            )
        if any(group.get("differentiable") for group in inner.optimizer.param_groups):
            raise ConfigError("differentiable=True cannot be sharded: the graph of a step would span all ranks")

    def owned_ids(self, layout: Layout, groups: Sequence[ParamGroup]) -> set[int]:
        params = all_params(groups)
        return {id(params[index]) for index in layout.owned_by(self.comm.group.rank)}

    def facts(self, layout: Layout, groups: Sequence[ParamGroup]) -> list[str]:
        """What must be equal on all ranks, most telling first."""
        settings = (
            f"{self.recipe.name}, {self.config.describe()}, bucket view {self.flat}, "
            f"overlap with DDP {self.overlap}, {len(groups)} groups"
        )
        specs = [spec.describe() for spec in layout.params]
        return [settings, *specs, *describe_groups(groups), f"layout {layout.digest}"]


def all_params(groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
