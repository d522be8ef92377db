"""Whole parameters: one rank owns each parameter, updates it in place and broadcasts it to all ranks.

The inner optimizer holds the user's own parameters, namely those that this rank owns, and reads gradients from
`param.grad`, where the user or DDP has averaged them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._types import Rank
from ..comm.collectives import Comm
from ..layout.chunks import storage_numel
from ..layout.layout import Layout
from ..profiling import Phase, StepProfiler
from ..state.shard_tensor import ShardTensor, make_empty_shard
from ..state.state_dict import SavedState, StateShard, extract_local_state_dict
from .checks import GradSample
from .grad_source import GradSource
from .inner import InnerOptimizer, LocalOptimizer, ParamGroup, load_state
from .optimizer_shard import OptimizerSpec
from .param_memory import ParamMemory
from .param_store import OptimizerState, ParamStore, StateAllocator
from .probe import OptimizerTraits
from .state import StateKeys, allocate_full, rebuild_subclass_state
from .step import Step


class WholeParamMember:
    """The one optimizer class of a `WholeParamStore`."""

    inner: LocalOptimizer

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec, self.name = spec, spec.name
        self.group_ids: list[int] = []

    @property
    def traits(self) -> OptimizerTraits:
        return self.spec.traits


class WholeParamStore(ParamStore):
    """Parameters keep their shape; this rank updates those that it owns."""

    def __init__(self, comm: Comm, profiler: StepProfiler, spec: OptimizerSpec, memory: ParamMemory) -> None:
        super().__init__(comm, profiler, memory)
        self.member = WholeParamMember(spec)
        self.members = [self.member]
        self.inner = InnerOptimizer(self.members, profiler)
        self._versions: dict[int, int] = {}
        """Versions before the update of owned parameters that have no gradient."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        member, first_new = self.member, len(self.member.group_ids)
        params = [param for group in groups for param in group["params"]]
        new_indices = layout.params_owned_by(self._comm.group.rank, first_bucket=len(self.layout.buckets))
        owned_ids = {id(params[index]) for index in new_indices}
        member.group_ids = list(range(len(groups)))
        if not first_new:
            member.inner = member.spec.factory.build(owned_ids)
        else:
            member.inner.add_groups(groups[:first_new], groups[first_new:], owned_ids)

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.memory.prepare(layout, [param for group in groups for param in group["params"]])

    def rollback(self, first_group: int) -> None:
        del self.member.group_ids[first_group:]
        self.member.inner.drop_groups(first_group)
        self.memory.rollback()

    def shard_tensor(self, index: int) -> ShardTensor:
        param = self.tensors[index].detach()
        if self.layout.owner_of(index) != self._comm.group.rank:
            return make_empty_shard(param)
        flat = param.as_strided((storage_numel(param.shape, param.stride()),), (1,))
        return ShardTensor(flat, param.shape, param.stride(), 0)

    def start_update(self, step: Step) -> None:
        mask, params = step.update_mask, self.tensors
        self._versions = {index: params[index]._version for index in self.owned_indices if not mask[index]}

    def assign_grads(self, step: Step, grads: GradSource) -> None:
        """Do nothing: the inner optimizer reads `param.grad`."""

    def grad_samples(self, step: Step, grads: GradSource) -> Iterator[GradSample]:  # noqa: ARG002
        for index in self.owned_indices:
            grad = self.tensors[index].grad
            if grad is not None:
                yield GradSample.from_grad(index, grad)

    def clear_assigned_grads(self) -> None:
        """Do nothing: gradients in `param.grad` are the user's."""

    def write_back(self, step: Step) -> None:  # noqa: ARG002
        self.memory.rebind_if_moved(self.owned_indices)

    def finish_update(self, step: Step) -> None:
        changed = [index for index, version in self._versions.items() if self.tensors[index]._version != version]
        if changed:
            mask = bytearray(step.update_mask)
            for index in changed:
                mask[index] = 1
            step.update_mask = bytes(mask)
        self.write_back(step)

    # ---- updates outside of `Engine.step`

    def update_params(self, groups: Sequence[ParamGroup], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some of this rank's parameters with the given gradients. Does not communicate.

        Several such updates make one step: each starts from the options in `groups`, which it does not change.
        """
        self.inner.push_options(groups)
        grads_before = {param: param.grad for param in grads}
        try:
            for param, grad in grads.items():
                param.grad = grad
            phase = self._profiler.phase(Phase.INNER_STEP, self.member.name)
            with phase, self.member.inner.restrict_to({id(param) for param in grads}):
                self.member.inner.step()
            self.memory.rebind_if_moved(self.owned_indices)
        finally:
            for param, grad_before in grads_before.items():
                param.grad = grad_before

    def local_step(
        self, groups: Sequence[ParamGroup], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """Update this rank's parameters with the gradients in `param.grad`. Does not communicate."""
        self.memory.rebind_if_moved()
        result = self.inner.run(groups, closure, kwargs)
        self.memory.rebind_if_moved(self.owned_indices)
        return result


class WholeParamState(OptimizerState):
    """State of whole parameters: the inner optimizer's own."""

    def __init__(self, rank: Rank, store: WholeParamStore) -> None:
        super().__init__(rank, store)
        self._member = store.member

    def view(self) -> dict[Any, Any]:
        return self._member.inner.optimizer.state

    def replace(self, state: Any) -> None:
        self._member.inner.optimizer.state = state

    def shards(self) -> list[StateShard]:
        state = self._member.inner.optimizer.state
        # Reading the state of another rank's parameter leaves an empty entry in a defaultdict, which is not ours.
        owned = self._store.owned_by(self._rank)
        return [StateShard(index, None, (), state[param]) for index, param in owned.items() if param in state]

    def local_optimizer_of(self, index: int) -> LocalOptimizer:  # noqa: ARG002
        return self._member.inner

    def param_shaped_keys(self, index: int) -> frozenset[str]:  # noqa: ARG002
        return self._member.traits.param_shaped_keys

    def allocator(
        self,
        state_keys: StateKeys,  # noqa: ARG002
        *,
        in_place: bool,
        param_shaped_keys: frozenset[Any],  # noqa: ARG002
    ) -> StateAllocator:
        state = self._member.inner.optimizer.state

        def allocate(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            param = self._store.tensors[index]
            present = state[param].get(key) if in_place and param in state else None
            return allocate_full(present, shape, dtype, param.device, param=param)

        return allocate

    def load(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        optimizer, factory = self._member.inner.optimizer, self._member.spec.factory
        owned_by_group: list[list[int]] = [[] for _ in optimizer.param_groups]
        for index in self._store.owned_indices:
            owned_by_group[self._store.layout.params[index].group].append(index)
        local = rebuild_subclass_state(extract_local_state_dict(saved, owned_by_group), factory, optimizer)
        return load_state(optimizer, local, caller_tensors=None if assign else saved.tensor_containers)
