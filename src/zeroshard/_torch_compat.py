"""The private torch APIs that zeroshard relies on, in one place.

Works with torch 2.11 to 2.13. tests/unit/test_torch_compat.py has a test for each, which fails if a torch release
removes or changes it. Parts of torch that load slowly are imported inside functions.

Some private names stay where they are used, because a wrapper would only hide them. They are tested as well:

- `state/dcp_compat.py` recognizes stack frames of `torch.distributed.checkpoint` (DCP);
- `state/shard_tensor.py` implements DCP's protocol for sharded tensors, with `_make_wrapper_subclass` and `_to_copy`;
- `engine/module_hooks.py` reads `_parameters` and `_buffers` of modules, and replaces `_parameters`;
- `checkpoint/optimizer_adapter.py` checks whether a module class overrides `_load_from_state_dict`;
- `checkpoint/metadata.py` and `checkpoint/reader.py` know names that checkpoint files contain: `_MEM_FORMAT_ENCODING`,
  `_get_layout`, `_rebuild_tensor_v2`;
- `GradScaler` overrides `_unscale_grads_`; optimizers set `_step_supports_amp_scaling`, which torch's scaler reads;
- `Tensor._version`, the version counter that torch's notes on autograd describe.
"""

import inspect
import json
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils._pytree
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction
from torch.distributed.algorithms.join import Joinable
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _world,
)
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as _optim
from torch.overrides import _get_current_function_mode_stack

try:
    from torch._C._autograd import _enable_record_function, _profiler_enabled
except ImportError:  # another torch version: no labels in traces

    def _profiler_enabled() -> bool:
        return False

    def _enable_record_function(enable: bool) -> None:
        pass


class Hooks(NamedTuple):
    """Registered hooks by id; pre-hooks run before the call, post-hooks after it."""

    pre: MutableMapping[int, Callable[..., Any]]
    post: MutableMapping[int, Callable[..., Any]]


# ---------------------------------------------------------------------------------------------------------------------
# Tensors and operators. Aliases, so that calls cost no more than torch's own.


foreach_copy_ = torch._foreach_copy_
"""`torch._foreach_copy_`: packs and unpacks buckets with one kernel for many tensors."""

foreach_add_ = torch._foreach_add_
"""`torch._foreach_add_`: adds gradients to a packed bucket."""

foreach_mul_ = torch._foreach_mul_
"""`torch._foreach_mul_`: scales packed gradients."""

amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""`torch._amp_foreach_non_finite_check_and_unscale_`: unscales gradient shards and sets the found-inf flag."""

AMP_UNSCALE_OP = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""`aten::_amp_foreach_non_finite_check_and_unscale_`: torch's GradScaler calls it on gradient placeholders."""

TO_COPY_OP = torch.ops.aten._to_copy.default
"""`aten::_to_copy`: the operator of `Tensor.to`, when a model moves together with its gradient placeholders."""

ITEM_OP = torch.ops.aten._local_scalar_dense.default
"""`aten::_local_scalar_dense`: the operator of `Tensor.item`, which meta tensors do not support."""

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""`Tensor._make_wrapper_subclass`: creates gradient placeholders, tensors without storage."""

is_view = torch.Tensor._is_view
"""`Tensor._is_view`: views share a version counter with their base."""

sparse_indices = torch.Tensor._indices
"""`Tensor._indices`: indices of a sparse tensor that may be uncoalesced."""

sparse_values = torch.Tensor._values
"""`Tensor._values`: values of a sparse tensor that may be uncoalesced."""

is_traceable_wrapper_subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""`torch.utils._python_dispatch`: whether a tensor is made of inner tensors (`__tensor_flatten__`)."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""`torch.utils._python_dispatch`: observes the operators of an optimizer's step to measure its memory."""

tree_leaves = torch.utils._pytree.tree_leaves
"""`torch.utils._pytree`: finds the tensors among an operator's arguments and results."""


def has_custom_modes() -> bool:
    """Wrap torch's mode stacks: whether a mode other than the default device's is active and may change results."""
    function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    is_custom = any(type(mode) is not torch.utils._device.DeviceContext for mode in function_modes)
    return is_custom or bool(torch._C._len_torch_dispatch_stack())


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, profiler, compiler.


current_graph_task_id = torch._C._current_graph_task_id
"""`torch._C._current_graph_task_id`: id of the backward pass that runs in this thread; -1 if none does."""

CUSTOM_BACKWARD_CODE: CodeType = BackwardCFunction.apply.__code__
"""Code of `BackwardCFunction.apply`: on the stack inside the backward of an `autograd.Function`."""

profiler_enabled = _profiler_enabled
"""`torch._C._autograd._profiler_enabled`: label strings are built only while a profiler is active."""

enable_record_function = _enable_record_function
"""`torch._C._autograd._enable_record_function`: pauses the profiler while gloo messages are started."""

disable_dynamo = _disable_dynamo
"""`torch._compile._disable_dynamo`: like `torch.compiler.disable`, but imports the compiler only on first use."""


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Wrap `Variable._execution_engine.queue_callback`: run `callback` at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def post_accumulate_grad_hooks(param: torch.Tensor) -> MutableMapping[int, Any]:
    """Wrap `Tensor._post_accumulate_grad_hooks`: the live dict, to remove hooks of optimizers that are gone."""
    hooks: Any = param._post_accumulate_grad_hooks
    return hooks or {}


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers.


def step_hooks(optimizer: Optimizer) -> Hooks:
    """Wrap `Optimizer._optimizer_step_{pre,post}_hooks`: run the inner optimizer's hooks without the global ones."""
    return Hooks(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)


def share_step_hooks(source: Optimizer, target: Optimizer) -> None:
    """Wrap the same dicts: give `target` those of `source`, so that handles of hooks still remove them."""
    target._optimizer_step_pre_hooks = source._optimizer_step_pre_hooks
    target._optimizer_step_post_hooks = source._optimizer_step_post_hooks


def global_step_hooks() -> Hooks:
    """Wrap `torch.optim.optimizer._global_optimizer_{pre,post}_hooks`: suspend them while optimizers are probed."""
    return Hooks(_optim._global_optimizer_pre_hooks, _optim._global_optimizer_post_hooks)


def state_dict_hooks(optimizer: Optimizer) -> Hooks:
    """Wrap `Optimizer._optimizer_state_dict_{pre,post}_hooks`: run them on the state dict of all ranks."""
    return Hooks(optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)


def load_state_dict_hooks(optimizer: Optimizer) -> Hooks:
    """Wrap `Optimizer._optimizer_load_state_dict_{pre,post}_hooks`: run them, and find optimizers that have any."""
    return Hooks(optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks)


def unhooked_step(optimizer_class: type[Optimizer]) -> Callable[..., Any] | None:
    """Wrap the mark `hooked` of `Optimizer.step`: return the function that torch wrapped to run hooks, or None."""
    step = optimizer_class.step
    return getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None


cast_loaded_state = Optimizer._process_value_according_to_param_policy
"""`Optimizer._process_value_according_to_param_policy`: dtype and device that torch gives to loaded state."""


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Wrap `Optimizer._step_supports_amp_scaling`: whether fused kernels unscale gradients inside `step()`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def mark_stepped(optimizer: Optimizer) -> None:
    """Wrap `Optimizer._opt_called`: stop schedulers from warning that an optimizer, now replaced, never steps."""
    vars(optimizer)["_opt_called"] = True


# ---------------------------------------------------------------------------------------------------------------------
# Modules, DDP, Join.


def forward_pre_hooks(module: Module) -> MutableMapping[int, Any]:
    """Wrap `Module._forward_pre_hooks`: the live dict, to remove hooks of optimizers that are gone."""
    return module._forward_pre_hooks


def has_load_hooks(module: Module) -> bool:
    """Wrap `Module._load_state_dict_{pre,post}_hooks`: whether loading runs hooks, which may fail."""
    return bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


def is_compiled_module(module: Module) -> bool:
    """Wrap `Module._compiled_call_impl` and `_orig_mod`: whether forward runs compiled, without submodules' hooks."""
    # Hazard: `getattr` for an attribute that a module lacks would search its `_parameters`, which may wait.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def active_ddp() -> DistributedDataParallel | None:
    """Wrap `DistributedDataParallel._active_ddp_module`: the DDP module whose forward pass is running, or None."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def is_in_join(joinable: Joinable) -> bool:
    """Wrap `Joinable._join_config`: whether a `Join` context manages `joinable`."""
    return bool(joinable._join_config.enable)


def leave_join(joinable: Joinable) -> None:
    """Wrap `Joinable._join_config`: reset what torch's `Join` leaves set at its end."""
    joinable._join_config = joinable._join_config._replace(enable=False)


# ---------------------------------------------------------------------------------------------------------------------
# Process groups.


def open_groups() -> list[dist.ProcessGroup]:
    """Wrap `distributed_c10d._world`: all process groups that were not destroyed."""
    return list(_world.pg_map)


def is_open(group: dist.ProcessGroup) -> bool:
    """Wrap `distributed_c10d._world`: whether a process group was not destroyed."""
    return group in _world.pg_map


def wrapped_excepthook(hook: Callable[..., object]) -> Callable[..., object] | None:
    """Return the `sys.excepthook` that torch has wrapped in `hook` to print the rank; None if `hook` is not torch's."""
    if getattr(hook, "__qualname__", "") != "init_process_group.<locals>._distributed_excepthook":
        return None
    wrapped: Callable[..., object] | None = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return wrapped


def default_store() -> Any:
    """Wrap `distributed_c10d._get_default_store`: the store of the rendezvous, where ranks report failures."""
    return _get_default_store()


def group_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Wrap `ProcessGroup._device_types`: the kinds of devices that have a backend."""
    return group._device_types


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Wrap `ProcessGroup._get_backend`: name of the backend for a device. Raises RuntimeError if there is none."""
    return str(group._get_backend(device).name())


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Wrap `Backend.options._timeout`: the timeout of collectives, which companion groups inherit."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def new_gloo_group(name: str, global_ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Wrap `distributed_c10d._new_process_group_helper`: create a gloo group with this name. Its ranks must call.

    `dist.new_group` would derive the name of a group that only its members create from the number of groups that the
    process is in. If that differs between members, they would wait for each other until the timeout.
    """
    while name in _world.pg_names.values():
        name += "+"  # on all members: they have created equally many
    ranks, rank = list(global_ranks), dist.get_rank()
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        ranks,
        dist.Backend("gloo"),
        _get_default_store(),
        name,  # type: ignore[arg-type]
        timeout=timeout or _get_default_timeout(dist.Backend("gloo")),
    )
    _world.pg_group_ranks[group] = {member: position for position, member in enumerate(ranks)}
    return group


def collective_sequence_numbers() -> list[int]:
    """Wrap `Backend._get_sequence_number_for_group`: counts collectives, to notice optimizers that communicate."""
    groups: list[Any] = open_groups()
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return [backend._get_sequence_number_for_group() for backend in backends]


def flight_recorder_entries() -> list[dict[str, Any]]:
    """Wrap `torch._C._distributed_c10d._dump_fr_trace_json`: the last collectives of this rank, oldest first."""
    recorder: Any = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = json.loads(recorder._dump_fr_trace_json(includeCollectives=True)).get("entries", [])
    return entries


def flight_recorder_dump() -> bytes:
    """Wrap `torch._C._distributed_c10d._dump_fr_trace`: the same as a file for `torchfrtrace`."""
    recorder: Any = torch._C._distributed_c10d
    dump: bytes = recorder._dump_fr_trace()
    return dump


# ---------------------------------------------------------------------------------------------------------------------
# Files and checkpoints.


get_layout: Callable[[str], torch.layout] = torch.serialization._get_layout
"""`torch.serialization._get_layout`: checkpoint metadata names it to restore a `torch.layout`."""


def open_archive(stream: Any) -> Any:
    """Wrap `torch._C.PyTorchFileReader`: names, contents and offsets of the records in a `torch.save` archive."""
    return torch._C.PyTorchFileReader(stream)


def storage_offset_in_file(tensor: torch.Tensor) -> int:
    """Wrap `UntypedStorage._checkpoint_offset`: where `torch.load` on the meta device found a tensor's memory."""
    storage: Any = tensor.untyped_storage()
    offset: int = storage._checkpoint_offset
    return offset


def make_fake_mode() -> Any:
    """Wrap `torch._subclasses.FakeTensorMode`: tensors without memory, to write archives before their data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def make_file_view(stream: BinaryIO, offset: int, length: int) -> Any:
    """Wrap DCP's `_create_file_view`: a range of a file as a stream."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(stream, offset, length)  # type: ignore[arg-type]


def set_element(root: dict[str, Any] | MutableSequence[Any], path: tuple[Any, ...], value: Any) -> None:
    """Wrap DCP's `_traverse.set_element`: set a value in nested containers, which are created as needed."""
    from torch.distributed.checkpoint._traverse import set_element

    set_element(root, path, value)  # type: ignore[arg-type]


def dcp_storage_info_class() -> type[Any]:
    """Wrap DCP's `filesystem._StorageInfo`: file, offset and length of a value in a checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def dcp_storage_prefix_class() -> type[Any]:
    """Wrap DCP's `filesystem._StoragePrefix`: checkpoint metadata may contain it."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix


def dcp_metadata_file_name() -> str:
    """Wrap DCP's `filesystem._metadata_fn`: the name of the metadata file."""
    from torch.distributed.checkpoint.filesystem import _metadata_fn

    return _metadata_fn
