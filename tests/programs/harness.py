"""Helpers of all programs: data, the averaging oracle, a function per operation of the loop, and the comparison.

Scripts contain the source of the functions and classes that they use, so names must be those of `HEADER`'s imports or
of this module. `run.sharded` tells the sides apart: zeroshard, or DDP with the plain optimizer.
"""

import contextlib
import copy
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from zeroshard import checkpoint

HEADER = """\
import contextlib
import copy
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import zeroshard
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint as checkpoint_activations
from zeroshard import checkpoint
"""


# ---- Data, and the expected average


def make_batch(number: int, size: int) -> Tensor:
    """Return inputs that differ between passes and between ranks."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(size, 8, generator=generator)


def average(grads: list[Tensor], shard_group_size: int, reduce_dtype: torch.dtype | None) -> Tensor:
    """Average the gradients of all ranks: round to `reduce_dtype`, sum shard groups in rank order, then the groups."""
    is_rounded = reduce_dtype is not None and len(grads) > 1 and grads[0].dtype.itemsize > reduce_dtype.itemsize
    rounded = [grad.to(reduce_dtype) for grad in grads] if is_rounded else grads
    sum_dtype = torch.float32 if rounded[0].dtype in (torch.bfloat16, torch.float16) else grads[0].dtype
    scaled = [grad.to(sum_dtype) * (1 / len(grads)) for grad in rounded]
    group_sums = [
        sum(scaled[start + 1 : start + shard_group_size], scaled[start])
        for start in range(0, len(grads), shard_group_size)
    ]
    return sum(group_sums[1:], group_sums[0])


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def broadcast_params(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    for param in model.parameters():
        values = param.detach().contiguous()  # gloo does not keep strides
        dist.broadcast(values, 0, group=group)
        param.data.copy_(values)


def averaging_hook(
    group: dist.ProcessGroup | None, shard_group_size: int = 0, reduce_dtype: torch.dtype | None = None
) -> Callable[[Any, Any], Future[Tensor]]:
    """Return a DDP communication hook that sums in rank order, so results are deterministic at any world size."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        future: Future[Tensor] = Future()
        buffer = bucket.buffer()
        grads = all_gather(buffer, group)
        future.set_result(buffer.copy_(average(grads, shard_group_size or len(grads), reduce_dtype)))
        return future

    return hook


# ---- One side: the model and its optimizers


class Run:
    """A model in training, sharded or under DDP with plain optimizers."""

    def __init__(self, model: nn.Module, sharded: bool, group: dist.ProcessGroup | None) -> None:
        self.model, self.sharded, self.group = model, sharded, group
        self.net: Any = model
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.scaler: Any = None
        self.wrap: Callable[[dist.ProcessGroup | None], None] = lambda _: None
        """Wrap the model in a new DDP, as DDP requires if the trainable parameters or the ranks change."""
        self.frozen: set[str] = set()
        self.added: list[str] = []
        self.is_member = True
        self.keeps_buffers = True
        """DDP is on both sides: each rank's buffers must be equal on both sides at any time."""
        self.passes = self.synced_passes = 0
        self.log: list[tuple[str, Any]] = []

    def params(self) -> list[Tensor]:
        """Return the parameters whose gradients are clipped."""
        groups = [
            group for optimizer in self.optimizers for group in getattr(optimizer, "clipped", optimizer.param_groups)
        ]
        return [param for group in groups for param in group["params"]]

    def record(self, label: str, value: Any) -> None:
        self.log.append((f"{label} after pass {self.passes}", copy.deepcopy(value)))


class MasterOptimizer:
    """The oracle of master weights: a plain optimizer updates float32 copies, which are rounded into the parameters.

    `average` averages gradients here, before they are rounded. If it is None, DDP averages them.
    """

    def __init__(
        self, run: Run, make: Callable[[Any], Any], groups: Any, average: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.run, self.average, self.has_grads = run, average, False
        self.pairs: list[tuple[Tensor, Tensor]] = []
        master_groups: list[dict[str, Any]] = []
        for group in groups:
            named = []
            for name, param in group["params"]:
                dtype = torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
                named.append((name, nn.Parameter(param.detach().to(dtype), requires_grad=False)))
                self.pairs.append((param, named[-1][1]))
            master_groups.append({**group, "params": named})
        self.inner = make(master_groups)
        if average is None:
            self.clipped = [{"params": [param for param, _ in self.pairs]}]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def collect_grads(self) -> None:
        """Set the gradients of the master weights to those of the parameters."""
        if self.has_grads:
            return
        self.has_grads = True
        used = torch.tensor([float(param.grad is not None) for param, _ in self.pairs])
        if self.average is not None:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.run.group)
        for (param, master), is_used in zip(self.pairs, used.tolist(), strict=True):
            if not is_used:
                master.grad = None
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            master.grad = (grad if self.average is None else self.average(grad)).to(master.dtype)

    @torch.no_grad()
    def step(self) -> None:
        self.collect_grads()
        self.inner.step()
        for param, master in self.pairs:
            if master.grad is not None:
                param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        self.has_grads = False
        for param, _ in self.pairs:
            param.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {index: dict(state) for index, state in state_dict["state"].items()}
        for index, (_, master) in enumerate(self.pairs):
            master.data.copy_(states.get(index, {}).pop("master_weights", master))
        self.inner.load_state_dict({**state_dict, "state": {index: state for index, state in states.items() if state}})

    def state_dict(self) -> dict[str, Any]:
        state_dict: dict[str, Any] = copy.deepcopy(self.inner.state_dict())
        for index, (param, master) in enumerate(self.pairs):
            if param.dtype != master.dtype:
                state_dict["state"].setdefault(index, {})["master_weights"] = master.detach()
        return state_dict


@contextlib.contextmanager
def offload_without_gpu() -> Iterator[None]:
    """Treat the CPU as an offload device: all copies of offloaded state are made, but within host memory."""
    from zeroshard import build
    from zeroshard.engine import offload

    before = offload.is_offload_device
    try:
        offload.is_offload_device = build.is_offload_device = lambda _: True  # type: ignore[attr-defined,assignment]
        yield
    finally:
        offload.is_offload_device = build.is_offload_device = before  # type: ignore[attr-defined]


# ---- Operations of the loop


def compute_loss(run: Run, size: int) -> Tensor:
    run.passes += 1
    inputs = make_batch(run.passes, size)
    dtype = next(run.model.parameters()).dtype
    loss: Tensor = (run.net(inputs.to(dtype)).float() - inputs.flip(0)).square().mean()
    run.record("loss", loss.detach())
    return loss


def backward(run: Run, size: int, local: tuple[int, ...] = (0,), synced: bool = True, nonfinite_rank: int = -1) -> None:
    """Run this rank's `local` passes inside no_sync(), then one outside unless `synced` is False."""
    rank, passes = dist.get_rank(), run.passes
    for _ in range(local[rank % len(local)]):
        with run.no_sync():
            torch.autograd.backward(scale_loss(run, compute_loss(run, size)))
    run.passes = passes + max(local)
    if synced:
        loss = compute_loss(run, size)
        torch.autograd.backward(scale_loss(run, loss * math.inf if rank == nonfinite_rank else loss))


def scale_loss(run: Run, loss: Tensor) -> Tensor:
    return run.scaler.scale(loss) if run.scaler is not None else loss


def average_manually(run: Run, shard_group_size: int, reduce_dtype: torch.dtype | None) -> None:
    """Average after passes that were all inside no_sync(). With `shard`, step() does that; with DDP, the user must."""
    if run.sharded:
        return
    used = torch.tensor([float(param.grad is not None) for param in run.params()])
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for param, is_used in zip(run.params(), used.tolist(), strict=True):
        if is_used:
            grads = all_gather(torch.zeros_like(param) if param.grad is None else param.grad, None)
            param.grad = torch.empty_like(param).copy_(average(grads, shard_group_size or len(grads), reduce_dtype))


def clip(run: Run, kind: str, limit: float, by_torch: bool = False) -> None:
    for optimizer in run.optimizers:
        if run.scaler is not None:
            run.scaler.unscale_(optimizer)
        if hasattr(optimizer, "collect_grads") and optimizer.average is not None:
            optimizer.collect_grads()
    order = math.inf if kind == "inf" else 2.0
    if run.sharded and not by_torch:
        (optimizer,) = run.optimizers
        norm = optimizer.clip_grad_value_(limit) if kind == "value" else optimizer.clip_grad_norm_(limit, order)
    elif kind == "value":
        norm = torch.nn.utils.clip_grad_value_(run.params(), limit)
    else:
        norm = torch.nn.utils.clip_grad_norm_(run.params(), limit, order)
    run.record("norm", norm)


def scale_grads(run: Run) -> None:
    for param in run.params():
        if param.grad is not None:
            param.grad.mul_(0.5)


def step(run: Run, size: int, closure: bool = False, skip_nonfinite: bool = False, record: bool = True) -> None:
    def compute_grads() -> Tensor:
        zero_grad(run)
        loss = compute_loss(run, size)
        torch.autograd.backward(loss)
        return loss.detach()

    if closure and (run.sharded or (len(run.optimizers) == 1 and not hasattr(run.optimizers[0], "collect_grads"))):
        run.record("loss of the step", run.optimizers[0].step(compute_grads))
    else:
        if closure:
            run.record("loss of the step", compute_grads())
        for optimizer in run.optimizers:
            if hasattr(optimizer, "collect_grads"):
                optimizer.collect_grads()
        grads = [param.grad for param in run.params() if param.grad is not None] if not run.sharded else []
        is_finite = not skip_nonfinite or run.scaler is not None or all(bool(grad.isfinite().all()) for grad in grads)
        for optimizer in run.optimizers if is_finite or run.sharded else ():
            run.scaler.step(optimizer) if run.scaler is not None else optimizer.step()
    if run.scaler is not None:
        run.scaler.update()
        run.record("scale", run.scaler.get_scale())
    for scheduler in run.schedulers:
        metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
    if record:
        record_model(run)


def step_after_overlap(run: Run, warmup: int, record: bool = True) -> None:
    """Step the plain side. The hook of the sharded side has stepped during backward, except in the warm-up passes."""
    run.synced_passes += 1
    if not run.sharded and run.synced_passes > warmup:
        run.optimizers[0].step()
    for scheduler in run.schedulers:
        metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
    if record:
        record_model(run)


def record_model(run: Run, stepped: bool = True) -> None:
    """Record parameters and buffers.

    Forward passes change each rank's buffers. A step of `shard` broadcasts those of rank 0, as DDP does before the next
    pass.
    """
    values = run.model.state_dict()  # waits for parameters that are being gathered
    buffers = dict(run.model.named_buffers())
    for name, value in values.items():
        if name not in buffers or run.keeps_buffers:
            run.record(name, value)
        elif stepped:
            buffer = value.clone()
            if not run.sharded:
                dist.broadcast(buffer, 0, group=run.group)
            run.record(name, buffer)
        elif dist.get_rank() == 0:
            run.record(name, value)


def zero_grad(run: Run, by: str = "optimizer", to_none: bool = True) -> None:
    for optimizer in run.optimizers:
        if by == "optimizer" or hasattr(optimizer, "collect_grads"):
            optimizer.zero_grad(set_to_none=to_none)
    if by == "model":
        run.model.zero_grad(set_to_none=to_none)
    if by == "hand":
        for param in run.model.parameters():
            param.grad = None


def edit_state(run: Run, edit: str) -> None:
    """Edit optimizer state in the same way on both sides. On the sharded side a rank has only its shard."""
    params = list(run.model.parameters())
    for optimizer in run.optimizers:
        if edit == "clear":
            optimizer.state.clear()
        elif edit == "delete every other":
            for param in params[::2]:
                if param in optimizer.state:
                    del optimizer.state[param]
        elif edit == "pop the first":
            optimizer.state.pop(params[0], None)
        else:
            for state in list(optimizer.state.values()):
                for key, value in list(state.items()):
                    if isinstance(value, Tensor) and key not in ("step", "mu_product"):
                        if edit == "zero in place":
                            value.zero_()
                        elif edit == "halve in place":
                            value.mul_(0.5)
                        else:
                            state[key] = torch.zeros_like(value)


def edit_options(run: Run, factor: float) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def freeze(run: Run, name: str, frozen: bool) -> None:
    run.model.get_submodule(name).requires_grad_(not frozen)
    (run.frozen.add if frozen else run.frozen.discard)(name)
    run.wrap(run.group)


def add_group(run: Run, name: str) -> None:
    """Unfreeze the parameters of a block that was in no group, and add them as a group."""
    block = run.model.get_submodule(name).requires_grad_(True)
    named = [(f"{name}.{suffix}", param) for suffix, param in block.named_parameters()]
    run.optimizers[0].add_param_group({"params": named, "lr": 0.02})
    run.frozen.discard(name)
    run.added.append(name)
    run.wrap(run.group)


def evaluate(run: Run, rank: int, size: int) -> None:
    """Run the model on one rank only."""
    if dist.get_rank() == rank:
        run.model.eval()
        with torch.no_grad():
            dtype = next(run.model.parameters()).dtype
            run.record("evaluation", run.model(make_batch(500 + run.passes, size).to(dtype)))
        run.model.train()


def record_state(run: Run) -> None:
    """Record all optimizer state by parameter name, and all options, on rank 0."""
    for optimizer in run.optimizers:
        state_dict = optimizer.full_state_dict(to=0) if run.sharded else optimizer.state_dict()
        if dist.get_rank() == 0:
            for group in state_dict["param_groups"]:
                excluded = ("params", "param_names", "optimizer")
                run.record("options", {key: value for key, value in sorted(group.items()) if key not in excluded})
                for index, name in zip(group["params"], group["param_names"], strict=True):
                    run.record(f"state of {name}", dict(sorted(state_dict["state"].get(index, {}).items())))


def train_unevenly(run: Run, counts: tuple[int, ...], size: int) -> None:
    """Train under `Join`. Rank r has `counts[r]` inputs."""
    zero_grad(run)
    ddp: list[Any] = [run.net] if isinstance(run.net, DistributedDataParallel) else []
    passes = run.passes
    with Join([*ddp, *run.optimizers] if run.sharded else ddp):
        for _ in range(counts[dist.get_rank()]):
            torch.autograd.backward(compute_loss(run, size))
            for optimizer in run.optimizers:
                optimizer.step()
            zero_grad(run)
    run.passes = passes + max(counts)
    if not run.sharded:  # a plain optimizer is up to date only on ranks that trained to the end
        for optimizer in run.optimizers:
            state = [optimizer.state_dict()]
            dist.broadcast_object_list(state, counts.index(max(counts)))
            optimizer.load_state_dict(state[0])
    run.wrap(run.group)  # a DDP without inputs has other buckets than those of the other ranks
    record_model(run)


def restart(
    build: Callable[..., Run],
    run: Run,
    directory: str,
    via: str,
    group: dist.ProcessGroup | None = None,
) -> Run:
    """Restart the sharded side on all ranks or on those of `group`: save, rebuild with other values, load.

    The plain side continues with its objects; ranks that rejoin get all values from rank 0.
    """
    is_member = group is None or dist.get_rank() < dist.get_world_size(group)
    zero_grad(run)
    if not run.sharded:
        states = [[stateful.state_dict() for stateful in [run.model, *run.optimizers, *run.schedulers]]]
        if group is None and run.group is not None:
            dist.broadcast_object_list(states, 0)
        for stateful, state in zip([run.model, *run.optimizers, *run.schedulers], states[0], strict=True):
            stateful.load_state_dict(state)  # even if nothing changes: loading casts state to the params' dtype
        run.group, run.is_member = group, is_member
        if is_member:
            run.wrap(group)
        return run
    saved: list[Any] = [None]
    if run.is_member:
        (optimizer,) = run.optimizers
        if via == "checkpoint":
            checkpoint.save(directory, step=run.passes, model=run.model, optimizer=optimizer, progress=False)
            saved = [[scheduler.state_dict() for scheduler in run.schedulers]]
        else:
            saved = [[run.model.state_dict(), optimizer.full_state_dict(to=0)]]
            saved[0] += [scheduler.state_dict() for scheduler in run.schedulers]
    dist.broadcast_object_list(saved, 0)
    new_run = build(True, seed=77, group=group, old=run) if is_member else run
    new_run.is_member, new_run.group = is_member, group
    if is_member:
        if via == "checkpoint":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the checkpoint was saved at another world size
                checkpoint.load(directory, model=new_run.model, optimizer=new_run.optimizers[0], progress=False)
        else:
            new_run.model.load_state_dict(saved[0].pop(0))
            new_run.optimizers[0].load_state_dict(saved[0].pop(0))
        for scheduler, state in zip(new_run.schedulers, saved[0], strict=True):
            scheduler.load_state_dict(state)
    return new_run


def assert_rejected(run: Run, label: str, call: Callable[[], object]) -> None:
    """Check that the call raises on all ranks."""
    if not run.sharded:
        return
    try:
        call()
        error_name = ""
    except Exception as error:
        error_name = type(error).__name__
    error_names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(error_names, error_name)
    assert all(error_names), f"REJECTION: {label} must raise on all ranks, got {error_names}"


def step_with_different_lr(run: Run) -> None:
    """Step with a different learning rate on each rank."""
    group = run.optimizers[0].param_groups[0]
    before = group["lr"]
    group["lr"] = before + 0.01 * dist.get_rank()
    try:
        run.optimizers[0].step()
    finally:
        group["lr"] = before


def clip_by_torch_and_step(run: Run) -> None:
    """Edit gradients that have been reduced already, then step."""
    torch.nn.utils.clip_grad_norm_(run.params(), 1e-6)
    run.optimizers[0].step()


def is_matrix(name: str, param: Tensor) -> bool:
    """Whether Muon updates the parameter."""
    return param.dim() == 2 and (".up." in name or ".down." in name)


def make_directory() -> str:
    directory = [tempfile.mkdtemp(prefix="zeroshard-program-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directory, 0)
    return directory[0]


def remove_directory(directory: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)


# ---- Comparison


def list_differences(
    found: list[tuple[str, Any]], expected: list[tuple[str, Any]], tolerances: dict[torch.dtype, tuple[float, float]]
) -> list[str]:
    """Describe the differences. `tolerances`: relative and absolute, by dtype; if empty, all bits must be equal."""
    if [label for label, _ in found] != [label for label, _ in expected]:
        ours, theirs = ([label for label, _ in log] for log in (found, expected))
        different = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]][:1]
        return [f"{len(ours)} and {len(theirs)} values were recorded; the first different labels: {different}"]
    texts = []
    for (label, our_value), (_, their_value) in zip(found, expected, strict=True):
        text = describe_difference(our_value, their_value, tolerances)
        if text:
            texts.append(f"{label}: {text}")
    return texts


def scale_tolerances(
    tolerances: dict[torch.dtype, tuple[float, float]], state: dict[Any, Any], key: Any
) -> dict[torch.dtype, tuple[float, float]]:
    """Scale tolerances for RMSprop's momentum: it holds updates that are not yet multiplied by the rate of 0.01."""
    scale = 100.0 if key == "momentum_buffer" and "square_avg" in state else 1.0
    return {dtype: (relative, absolute * scale) for dtype, (relative, absolute) in tolerances.items()}


def describe_difference(found: Any, expected: Any, tolerances: dict[torch.dtype, tuple[float, float]]) -> str:
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return f"zeroshard has {found if not isinstance(found, dict) else list(found)}, expected {list(expected)}"
        texts = [
            (key, describe_difference(found[key], value, scale_tolerances(tolerances, expected, key)))
            for key, value in expected.items()
        ]
        return "; ".join(f"{key}: {text}" for key, text in texts if text)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        if isinstance(expected, float) and isinstance(found, float) and tolerances:
            return "" if math.isclose(found, expected, rel_tol=1e-3) else f"zeroshard has {found}, expected {expected}"
        return (
            "" if type(found) is type(expected) and found == expected else f"zeroshard has {found}, expected {expected}"
        )
    kinds = [(value.dtype, tuple(value.shape)) for value in (found, expected)]
    if kinds[0] != kinds[1]:
        return f"zeroshard has {kinds[0]}, expected {kinds[1]}"
    relative, absolute = tolerances.get(expected.dtype, (0.0, 0.0))
    if torch.allclose(found, expected, rtol=relative, atol=absolute, equal_nan=True):
        return ""
    if expected.dtype == torch.bool or not expected.numel():
        return f"zeroshard has {found}, expected {expected}"
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    return f"the largest difference is {(found.to(dtype) - expected.to(dtype)).abs().max().item():.3e}"


def judge(train: Callable[[bool], list[tuple[str, Any]]], tolerances: dict[torch.dtype, tuple[float, float]]) -> str:
    """Return "same bits" or "within tolerance". Otherwise raise on all ranks, with the first differences of each."""
    expected = train(False)
    found = train(True)
    is_same = not list_differences(found, expected, {})
    differences = list_differences(found, expected, tolerances)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (is_same, differences[:4]))
    if any(texts for _, texts in by_rank):
        texts = [f"  rank {rank}: {text}" for rank, (_, texts) in enumerate(by_rank) for text in texts]
        raise AssertionError("DIFFERENT: zeroshard and DDP with the plain optimizer disagree:\n" + "\n".join(texts))
    return "same bits" if all(same for same, _ in by_rank) else "within tolerance"
