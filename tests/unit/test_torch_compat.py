"""Private torch APIs behave as `zeroshard._torch_compat` and its callers expect, and are used nowhere else."""

import ast
import io
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import zeroshard
from zeroshard import _torch_compat as compat

CPU = torch.device("cpu")


def make_param() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# Tensors and operators.


def test_foreach_ops_change_their_first_argument() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    compat.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])  # casts, as packing in the wire dtype needs
    compat.foreach_add_(targets, [torch.ones(2), torch.ones(3, dtype=torch.bfloat16)], alpha=0.5)
    compat.foreach_mul_(targets, 2.0)
    assert [target.tolist() for target in targets] == [[3.0] * 2, [3.0] * 3]


@pytest.mark.parametrize(("value", "found"), [(4.0, 0.0), (float("inf"), 1.0)])
def test_amp_unscale_multiplies_and_sets_the_flag(value: float, found: float) -> None:
    grad, flag = torch.tensor([value]), torch.zeros(())
    compat.amp_unscale_([grad], flag, torch.tensor(0.5))
    assert grad.item() == value / 2
    assert flag.item() == found


class _Recorder(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_operators_that_torch_dispatches() -> None:
    with _Recorder() as recorder:
        compat.amp_unscale_([torch.ones(1)], torch.zeros(()), torch.ones(()))
        torch.ones(1).to(torch.float64)
        torch.ones(1).item()
    for op in (compat.AMP_UNSCALE_OP, compat.TO_COPY_OP, compat.ITEM_OP):
        assert op in recorder.ops


class _Wrapper(torch.Tensor):
    data_tensor: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "_Wrapper":
        return make_wrapper(inner["data_tensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


def make_wrapper(inner: torch.Tensor) -> _Wrapper:
    wrapper: _Wrapper = compat.make_wrapper_subclass(
        _Wrapper, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
    )
    wrapper.data_tensor = inner
    return wrapper


def test_wrapper_subclasses_have_metadata_but_no_storage() -> None:
    wrapper = make_wrapper(torch.ones(2, 3, dtype=torch.float16).t())
    assert type(wrapper) is _Wrapper
    assert (tuple(wrapper.shape), wrapper.stride(), wrapper.dtype) == ((3, 2), (1, 3), torch.float16)
    assert compat.is_traceable_wrapper_subclass(wrapper)
    assert not compat.is_traceable_wrapper_subclass(torch.ones(1))


def test_views_and_version_counters() -> None:
    base = torch.zeros(4)
    view = base[:2]
    assert compat.is_view(view)
    assert not compat.is_view(base)
    before = base._version
    view.add_(1)  # views share the counter
    assert base._version == before + 1
    base.data.add_(1)  # `.data` does not
    assert base._version == before + 1


def test_components_of_uncoalesced_sparse_tensors() -> None:
    indices, values = torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=True)
    assert not sparse.is_coalesced()
    assert compat.sparse_indices(sparse).tolist() == indices.tolist()
    assert compat.sparse_values(sparse).tolist() == values.tolist()


def test_leaves_of_nested_arguments() -> None:
    assert compat.tree_leaves(((1, [2, 3]), {"a": 4, "b": (5,)})) == [1, 2, 3, 4, 5]


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_other_than_the_default_device_are_custom() -> None:
    assert not compat.has_custom_modes()
    with torch.device("meta"):
        assert not compat.has_custom_modes()
    with _FunctionMode():
        assert compat.has_custom_modes()
    with _Recorder():
        assert compat.has_custom_modes()


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, profiler, compiler.


def test_a_backward_pass_has_an_id_and_callbacks_at_its_end() -> None:
    param, events = make_param(), list[str]()
    ids = []

    def on_grad(_: torch.Tensor) -> None:
        ids.append(compat.current_graph_task_id())
        compat.queue_backward_callback(lambda: events.append("end"))
        events.append("grad")

    param.register_post_accumulate_grad_hook(on_grad)  # type: ignore[no-untyped-call]
    assert compat.current_graph_task_id() == -1
    for _ in range(2):
        param.sum().backward()  # type: ignore[no-untyped-call]
    assert events == ["grad", "end"] * 2
    assert len(set(ids)) == 2
    assert min(ids) >= 0


def test_post_accumulate_grad_hooks_can_be_removed() -> None:
    param, calls = make_param(), list[torch.Tensor]()
    assert not compat.post_accumulate_grad_hooks(param)
    param.register_post_accumulate_grad_hook(calls.append)  # type: ignore[no-untyped-call]
    hooks = compat.post_accumulate_grad_hooks(param)
    assert list(hooks.values()) == [calls.append]
    hooks.clear()
    param.sum().backward()  # type: ignore[no-untyped-call]
    assert not calls


def _runs_custom_backward() -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code is not compat.CUSTOM_BACKWARD_CODE:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def test_custom_backwards_have_their_code_on_the_stack() -> None:
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> Any:
            seen.append(_runs_custom_backward())
            return grad

    Identity.apply(make_param()).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [True]
    assert not _runs_custom_backward()


def test_profiler_flag_and_pause() -> None:
    assert not compat.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert compat.profiler_enabled()
        compat.enable_record_function(False)
        torch.ones(1).cos_()
        compat.enable_record_function(True)
        torch.ones(1).sin_()
    names = {event.name for event in profile.events()}
    assert "aten::sin_" in names
    assert "aten::cos_" not in names


def test_disable_dynamo_wraps_methods() -> None:
    class Counter:
        @compat.disable_dynamo
        def add(self, left: int, *, right: int) -> int:
            """Add."""
            return left + right

    assert Counter().add(1, right=2) == 3
    assert Counter.add.__doc__ == "Add."


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers.


@contextmanager
def registered(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_optimizer() -> SGD:
    param = make_param()
    param.grad = torch.ones(3)
    return SGD([param], lr=0.1)


def test_hooks_of_an_optimizer() -> None:
    optimizer = make_optimizer()

    def pre(*_: Any) -> None: ...

    def post(*_: Any) -> None: ...

    optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)
    optimizer.register_state_dict_pre_hook(pre)
    optimizer.register_state_dict_post_hook(post)
    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_post_hook(post)
    for hooks in (compat.step_hooks, compat.state_dict_hooks, compat.load_state_dict_hooks):
        assert [list(registry.values()) for registry in hooks(optimizer)] == [[pre], [post]]


def test_shared_step_hooks_run_and_are_removed_by_their_handles() -> None:
    source, target, calls = make_optimizer(), make_optimizer(), list[Any]()
    handle = source.register_step_post_hook(lambda *_: calls.append(1))
    compat.share_step_hooks(source, target)
    target.step()
    handle.remove()
    target.step()
    assert calls == [1]


def test_global_step_hooks_can_be_suspended() -> None:
    calls = list[str]()
    pre = register_optimizer_step_pre_hook(lambda *_: calls.append("pre"))
    post = register_optimizer_step_post_hook(lambda *_: calls.append("post"))
    with registered(pre, post):
        hooks = compat.global_step_hooks()
        saved = [dict(registry) for registry in hooks]
        assert [handle.id in registry for handle, registry in zip((pre, post), saved, strict=True)] == [True, True]
        try:
            for registry in hooks:
                registry.clear()
            make_optimizer().step()
            assert not calls
        finally:
            for registry, kept in zip(hooks, saved, strict=True):
                registry.update(kept)
        make_optimizer().step()
    assert calls == ["pre", "post"]


def test_unhooked_step_runs_no_hooks() -> None:
    optimizer, calls = make_optimizer(), list[int]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    step = compat.unhooked_step(SGD)
    assert step is not None
    before = optimizer.param_groups[0]["params"][0].clone()
    step(optimizer)
    assert not calls
    assert not torch.equal(before, optimizer.param_groups[0]["params"][0])


def test_loaded_state_is_cast_like_its_parameter_except_step() -> None:
    param, groups = torch.ones(3, dtype=torch.bfloat16), [{"params": [0]}]
    value = torch.ones(3, dtype=torch.float64)
    assert compat.cast_loaded_state(param, value, 0, groups, "exp_avg").dtype == torch.bfloat16
    assert compat.cast_loaded_state(param, torch.ones(()), 0, groups, "step").dtype == torch.float32


def test_fused_optimizers_support_amp_scaling() -> None:
    assert compat.supports_amp_scaling(Adam([make_param()], fused=True))
    assert not compat.supports_amp_scaling(Adam([make_param()], foreach=False))


def test_a_scaler_steps_unconditionally_if_the_optimizer_supports_amp_scaling() -> None:
    """`ZeroRedundancyOptimizer` sets the attribute, and skips on all ranks or none."""
    steps = []

    class Recording(SGD):
        _step_supports_amp_scaling = True
        found_inf: torch.Tensor

        def step(self, _: Any = None) -> None:  # type: ignore[override]
            steps.append(self.found_inf.item())

    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), Recording([param := make_param()], lr=0.1)
    scaler.scale(param.sum() * float("inf")).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    assert steps == [1.0]


def test_a_scaler_unscales_through_the_method_that_ours_overrides() -> None:
    calls = []

    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
            calls.append(args)
            return super()._unscale_grads_(*args)

    scaler, optimizer = Scaler("cpu", init_scale=4.0), SGD([param := make_param()], lr=0.1)
    scaler.scale(param.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    ((given, inverse_scale, found_inf, allow_fp16),) = calls
    assert (given, inverse_scale.item(), found_inf.item(), allow_fp16) == (optimizer, 0.25, 0.0, False)
    assert param.grad is not None
    assert param.grad.tolist() == [1.0] * 3


def test_schedulers_do_not_warn_about_an_optimizer_that_is_marked_as_stepped() -> None:
    optimizer = make_optimizer()
    scheduler = StepLR(optimizer, 1)
    compat.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    with pytest.warns(UserWarning, match=r"optimizer\.step"):
        StepLR(make_optimizer(), 1).step()


# ---------------------------------------------------------------------------------------------------------------------
# Modules, DDP, Join.


def test_forward_pre_hooks_can_be_removed() -> None:
    module, calls = nn.Linear(1, 1), list[int]()
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    hooks = compat.forward_pre_hooks(module)
    assert len(hooks) == 1
    hooks.clear()
    module(torch.ones(1))
    assert not calls


@pytest.mark.parametrize("name", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"])
def test_load_hooks_of_a_module(name: str) -> None:
    module = nn.Linear(1, 1)
    assert not compat.has_load_hooks(module)
    getattr(module, name)(lambda *_: None)
    assert compat.has_load_hooks(module)


def test_modules_load_through_the_method_that_classes_override() -> None:
    calls = []

    class Custom(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            calls.append(args)
            super()._load_from_state_dict(*args)

    module = Custom(1, 1)
    module.load_state_dict(module.state_dict())
    assert len(calls) == 1
    assert nn.Linear._load_from_state_dict.__module__.startswith("torch.")


def test_compiled_modules_are_recognized() -> None:
    plain, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert [compat.is_compiled_module(module) for module in (plain, in_place)] == [False, True]
    compiled: Any = torch.compile(plain, backend="eager")
    assert compat.is_compiled_module(compiled)
    assert not compat.is_compiled_module(plain)


def test_parameters_of_a_module_are_looked_up_in_a_dict_that_can_be_replaced() -> None:
    module, reads = nn.BatchNorm1d(1), list[str]()

    class Recording(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            reads.append(name)
            return super().__getitem__(name)

    weight = module._parameters["weight"]
    vars(module)["_parameters"] = Recording(module._parameters)
    assert module.weight is weight
    assert reads == ["weight"]
    assert list(module._buffers) == ["running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.usefixtures("single_rank")
def test_active_ddp_inside_its_forward_pass() -> None:
    seen = []

    class Probe(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            seen.append(compat.active_ddp())
            return super().forward(value)

    ddp = DistributedDataParallel(Probe(1, 1))
    ddp(torch.ones(1, 1))
    assert seen == [ddp]
    assert compat.active_ddp() is None


class _Joinable(Joinable):
    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **_: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return CPU

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@pytest.mark.usefixtures("single_rank")
def test_join_marks_its_joinables_until_they_leave() -> None:
    joinable = _Joinable()
    assert not compat.is_in_join(joinable)
    with Join([joinable]):
        assert compat.is_in_join(joinable)
    compat.leave_join(joinable)
    assert not compat.is_in_join(joinable)


# ---------------------------------------------------------------------------------------------------------------------
# Process groups.


@pytest.mark.usefixtures("single_rank")
def test_backend_of_a_group() -> None:
    group: Any = dist.new_group([0], timedelta(seconds=77), backend="gloo")
    assert "cpu" in {device.type for device in compat.group_devices(group)}
    assert compat.backend_name(group, CPU) == "gloo"
    assert compat.group_timeout(group) == timedelta(seconds=77)
    with pytest.raises(RuntimeError):
        compat.backend_name(group, torch.device("xpu"))


@pytest.mark.usefixtures("single_rank")
def test_gloo_group_with_a_name() -> None:
    group, other = (compat.new_gloo_group("its name", [0], timedelta(seconds=77)) for _ in range(2))
    assert (group.group_name, other.group_name) == ("its name", "its name+")
    assert compat.group_timeout(group) == timedelta(seconds=77)
    assert compat.group_timeout(compat.new_gloo_group("default timeout", [0], None)) is not None
    assert dist.get_process_group_ranks(group) == [0]
    values = torch.ones(3)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [1, 1, 1]
    dist.destroy_process_group(group)
    assert compat.is_open(other)


@pytest.mark.usefixtures("single_rank")
def test_groups_are_open_until_they_are_destroyed() -> None:
    world: Any = dist.group.WORLD
    group: Any = dist.new_group([0])
    assert compat.open_groups() == [world, group]
    dist.destroy_process_group(group)
    assert compat.open_groups() == [world]
    assert [compat.is_open(process_group) for process_group in (world, group)] == [True, False]


def test_excepthook_that_torch_wraps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def own_hook(*_: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own_hook)
    assert compat.wrapped_excepthook(own_hook) is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert compat.wrapped_excepthook(sys.excepthook) is own_hook
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
def test_default_store_appends() -> None:
    store = compat.default_store()
    for text in ("a", "b"):
        store.append("key", text)
    assert store.get("key") == b"ab"


@pytest.mark.usefixtures("single_rank")
def test_sequence_numbers_count_collectives() -> None:
    before = compat.collective_sequence_numbers()
    assert before == compat.collective_sequence_numbers()
    dist.all_reduce(torch.ones(1))
    assert before != compat.collective_sequence_numbers()


@pytest.mark.usefixtures("single_rank")
def test_flight_recorder_has_the_last_collective() -> None:
    dist.all_reduce(torch.ones(5))
    world: Any = dist.group.WORLD
    entry = [entry for entry in compat.flight_recorder_entries() if entry["process_group"][0] == world.group_name][-1]
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert entry["input_sizes"] == [[5]]
    assert entry["output_sizes"]
    assert (entry["is_p2p"], entry["collective_seq_id"] > 0) == (False, True)
    assert "p2p_seq_id" in entry
    assert isinstance(pickle.loads(compat.flight_recorder_dump())["entries"], list)


# ---------------------------------------------------------------------------------------------------------------------
# Files and checkpoints.


def save_to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_archive_reader_gives_names_and_offsets_of_records() -> None:
    tensor = torch.arange(100)
    data = save_to_bytes(tensor)
    reader = compat.open_archive(io.BytesIO(data))
    assert {"data.pkl", "data/0"} <= set(reader.get_all_records())
    start = reader.get_record_offset("data/0")
    assert data[start : start + tensor.nbytes] == tensor.numpy().tobytes()


def test_meta_tensors_know_their_offset_in_the_file() -> None:
    data = save_to_bytes(torch.ones(3))
    loaded = torch.load(io.BytesIO(data), map_location="meta", weights_only=True)
    assert compat.storage_offset_in_file(loaded) == compat.open_archive(io.BytesIO(data)).get_record_offset("data/0")


def test_fake_tensors_are_saved_without_data() -> None:
    with compat.make_fake_mode():
        fake = torch.empty(100)
    buffer = io.BytesIO()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fake, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert (type(loaded), loaded.shape) == (torch.Tensor, (100,))


def test_file_views_read_and_seek_inside_their_range() -> None:
    view = compat.make_file_view(io.BytesIO(b"0123456789"), 2, 5)
    assert view.read(3) == b"234"
    assert view.tell() == 3
    view.seek(0)
    assert view.read() == b"23456"
    view.seek(0, io.SEEK_END)
    assert view.tell() == 5


def test_set_element_creates_containers() -> None:
    root: dict[str, Any] = {}
    compat.set_element(root, ("a", 1, "b"), 5)
    compat.set_element(root, ("a", 0), 4)
    assert root == {"a": [4, {"b": 5}]}


def test_layouts_are_pickled_by_the_name_that_metadata_allow() -> None:
    function: Any = compat.get_layout
    assert f"{function.__module__}.{function.__qualname__}" == "torch.serialization._get_layout"
    assert function(str(torch.strided)) is torch.strided
    assert b"torch.serialization" in (data := pickle.dumps(torch.strided, 4))
    assert b"_get_layout" in data


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_in_checkpoint_files(tmp_path: Path) -> None:
    """The readers of metadata and tensors rely on these names."""
    dcp_save({"tensor": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / compat.dcp_metadata_file_name()).read_bytes()
    assert compat.dcp_metadata_file_name() == ".metadata"
    for name in ("_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout"):
        assert name.encode() in content
    loaded = pickle.loads(content)
    (info,) = loaded.storage_data.values()
    assert type(info) is compat.dcp_storage_info_class()
    with (tmp_path / info.relative_path).open("rb") as stream:
        assert b"ctorch._utils\n_rebuild_tensor_v2\n" in stream.read()
    encoding = metadata._MEM_FORMAT_ENCODING
    assert [member.value for member in encoding] == [0, 1, 2]
    assert encoding.__module__ == metadata.__name__


def test_classes_of_checkpoint_metadata() -> None:
    info = compat.dcp_storage_info_class()("file", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 4)
    prefix = compat.dcp_storage_prefix_class()("part")
    assert prefix.prefix == "part"
    assert type(info).__module__ == type(prefix).__module__ == filesystem.__name__


# ---------------------------------------------------------------------------------------------------------------------
# The whole package.


PACKAGE = Path(zeroshard.__file__).parent
EXEMPT = {"_torch_compat.py", "state/shard_tensor.py"}
SLOW_MODULES = ("torch.distributed.checkpoint", "torch._subclasses", "torch._dynamo", "torch._inductor")


def is_private(dotted: str) -> bool:
    """Whether a dotted name, not another expression, has a part with a leading underscore."""
    parts = dotted.split(".")
    return all(map(str.isidentifier, parts)) and any(re.match("_[^_]", part) for part in parts)


def private_torch_names(path: Path) -> list[str]:
    """Names with an underscore that a file imports from torch, or reads as attributes of its modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [name for name in names if name.startswith(("torch.", "dist.")) and is_private(name)]
    return found


def test_no_other_module_uses_private_torch_names() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    assert set(files) >= EXEMPT
    assert {name: used for name in set(files) - EXEMPT if (used := private_torch_names(files[name]))} == {}
    assert "torch._foreach_copy_" in private_torch_names(files["_torch_compat.py"])
    assert "torch._compile._disable_dynamo" in private_torch_names(files["_torch_compat.py"])


def test_slow_parts_of_torch_are_imported_inside_functions() -> None:
    tree = ast.parse((PACKAGE / "_torch_compat.py").read_text(encoding="utf-8"))
    on_load = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [text for node in on_load if any(slow in (text := ast.unparse(node)) for slow in SLOW_MODULES)]


def test_every_wrapper_is_documented_and_used() -> None:
    """A docstring, or for an alias the string that follows it; and a use in another module."""
    body = ast.parse((PACKAGE / "_torch_compat.py").read_text(encoding="utf-8")).body
    names: list[str] = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
            assert ast.get_docstring(node), node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names.append(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
            assert isinstance(following, ast.Expr), names[-1]
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert [name for name in names if len(re.findall(rf"\b{name}\b", sources)) < 2] == []
    assert len(names) > 40
