"""What every program uses: data, the averaging oracle, one operation of the loop per function, the comparison.

Scripts contain the source of the functions and classes that they use, so names must be those of `HEADER`'s imports or
of this module. `run.sharded` says which side it is: zeroshard, or DDP with the plain optimizer.
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


# ---- Data, and the average that is expected


def make_batch(number: int, size: int) -> Tensor:
    """Inputs that differ from pass to pass and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(size, 8, generator=generator)


def average(parts: list[Tensor], within: int, wire: torch.dtype | None) -> Tensor:
    """Of gradients of all ranks: rounded to `wire`, added in rank order, in rows of `within` ranks, then these sums."""
    is_rounded = wire is not None and len(parts) > 1 and parts[0].dtype.itemsize > wire.itemsize
    rounded = [part.to(wire) for part in parts] if is_rounded else parts
    precise = torch.float32 if rounded[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    scaled = [part.to(precise) * (1 / len(parts)) for part in rounded]
    rows = [sum(scaled[start + 1 : start + within], scaled[start]) for start in range(0, len(parts), within)]
    return sum(rows[1:], rows[0])


def gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


def broadcast_params(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    for param in model.parameters():
        values = param.detach().contiguous()  # gloo does not keep strides
        dist.broadcast(values, 0, group=group)
        param.data.copy_(values)


def averaging_hook(
    group: dist.ProcessGroup | None, within: int = 0, wire: torch.dtype | None = None
) -> Callable[[Any, Any], Future[Tensor]]:
    """A communication hook for DDP that adds in rank order: there is one right result on any number of ranks."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        done: Future[Tensor] = Future()
        buffer = bucket.buffer()
        parts = gather(buffer, group)
        done.set_result(buffer.copy_(average(parts, within or len(parts), wire)))
        return done

    return hook


# ---- One side: the model, what runs it, its optimizers


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
        """Put DDP around the model, again where other parameters train or other ranks take part."""
        self.frozen: set[str] = set()
        self.added: list[str] = []
        self.is_member = True
        self.keeps_buffers = True
        """DDP is on both sides: buffers of each rank must be equal at any time."""
        self.passes = self.synced_passes = 0
        self.log: list[tuple[str, Any]] = []

    def params(self) -> list[Tensor]:
        """Those whose gradients are clipped."""
        groups = [
            group for optimizer in self.optimizers for group in getattr(optimizer, "clipped", optimizer.param_groups)
        ]
        return [param for group in groups for param in group["params"]]

    def note(self, label: str, value: Any) -> None:
        self.log.append((f"{label} after pass {self.passes}", copy.deepcopy(value)))


class MasterOptimizer:
    """The oracle of master weights: a plain optimizer updates float32 copies, which are rounded into the parameters.

    `average`: gradients are averaged here, before they are rounded; else DDP has averaged them.
    """

    def __init__(
        self, run: Run, make: Callable[[Any], Any], groups: Any, average: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.run, self.average, self.has_grads = run, average, False
        self.pairs: list[tuple[Tensor, Tensor]] = []
        wide: list[dict[str, Any]] = []
        for group in groups:
            named = []
            for name, param in group["params"]:
                precise = torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype
                named.append((name, nn.Parameter(param.detach().to(precise), requires_grad=False)))
                self.pairs.append((param, named[-1][1]))
            wide.append({**group, "params": named})
        self.inner = make(wide)
        if average is None:
            self.clipped = [{"params": [param for param, _ in self.pairs]}]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def collect(self) -> None:
        """Gradients of the parameters become those of the copies."""
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
        self.collect()
        self.inner.step()
        for param, master in self.pairs:
            if master.grad is not None:
                param.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        self.has_grads = False
        for param, _ in self.pairs:
            param.grad = None

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        states = {number: dict(state) for number, state in whole["state"].items()}
        for number, (_, master) in enumerate(self.pairs):
            master.data.copy_(states.get(number, {}).pop("master_weights", master))
        self.inner.load_state_dict({**whole, "state": {number: state for number, state in states.items() if state}})

    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = copy.deepcopy(self.inner.state_dict())
        for number, (param, master) in enumerate(self.pairs):
            if param.dtype != master.dtype:
                whole["state"].setdefault(number, {})["master_weights"] = master.detach()
        return whole


@contextlib.contextmanager
def host_memory_stands_for_a_gpu() -> Iterator[None]:
    """Without a GPU: all moves of offloaded state are made, within host memory."""
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
    run.note("loss", loss.detach())
    return loss


def backward(run: Run, size: int, local: tuple[int, ...] = (0,), synced: bool = True, nonfinite_rank: int = -1) -> None:
    """`local` passes inside no_sync(), by rank, then one outside."""
    rank, passes = dist.get_rank(), run.passes
    for _ in range(local[rank % len(local)]):
        with run.no_sync():
            torch.autograd.backward(scaled(run, compute_loss(run, size)))
    run.passes = passes + max(local)
    if synced:
        loss = compute_loss(run, size)
        torch.autograd.backward(scaled(run, loss * math.inf if rank == nonfinite_rank else loss))


def scaled(run: Run, loss: Tensor) -> Tensor:
    return run.scaler.scale(loss) if run.scaler is not None else loss


def average_by_hand(run: Run, within: int, wire: torch.dtype | None) -> None:
    """All passes were inside no_sync(): step() of `shard` sends the sum. DDP leaves that to its user."""
    if run.sharded:
        return
    used = torch.tensor([float(param.grad is not None) for param in run.params()])
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for param, is_used in zip(run.params(), used.tolist(), strict=True):
        if is_used:
            parts = gather(torch.zeros_like(param) if param.grad is None else param.grad, None)
            param.grad = torch.empty_like(param).copy_(average(parts, within or len(parts), wire))


def clip(run: Run, kind: str, limit: float, by_torch: bool = False) -> None:
    for optimizer in run.optimizers:
        if run.scaler is not None:
            run.scaler.unscale_(optimizer)
        if hasattr(optimizer, "collect") and optimizer.average is not None:
            optimizer.collect()
    order = math.inf if kind == "inf" else 2.0
    if run.sharded and not by_torch:
        (optimizer,) = run.optimizers
        norm = optimizer.clip_grad_value_(limit) if kind == "value" else optimizer.clip_grad_norm_(limit, order)
    elif kind == "value":
        norm = torch.nn.utils.clip_grad_value_(run.params(), limit)
    else:
        norm = torch.nn.utils.clip_grad_norm_(run.params(), limit, order)
    run.note("norm", norm)


def scale_grads(run: Run) -> None:
    for param in run.params():
        if param.grad is not None:
            param.grad.mul_(0.5)


def step(run: Run, size: int, closure: bool = False, skips_nonfinite: bool = False, look: bool = True) -> None:
    def compute_grads() -> Tensor:
        zero_grad(run)
        loss = compute_loss(run, size)
        torch.autograd.backward(loss)
        return loss.detach()

    if closure and (run.sharded or (len(run.optimizers) == 1 and not hasattr(run.optimizers[0], "collect"))):
        run.note("loss of the step", run.optimizers[0].step(compute_grads))
    else:
        if closure:
            run.note("loss of the step", compute_grads())
        for optimizer in run.optimizers:
            if hasattr(optimizer, "collect"):
                optimizer.collect()
        grads = [param.grad for param in run.params() if param.grad is not None] if not run.sharded else []
        is_finite = not skips_nonfinite or run.scaler is not None or all(bool(grad.isfinite().all()) for grad in grads)
        for optimizer in run.optimizers if is_finite or run.sharded else ():
            run.scaler.step(optimizer) if run.scaler is not None else optimizer.step()
    if run.scaler is not None:
        run.scaler.update()
        run.note("scale", run.scaler.get_scale())
    for scheduler in run.schedulers:
        metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
    if look:
        note_model(run)


def overlapped_step(run: Run, warmup: int, look: bool = True) -> None:
    """The hook of the sharded side has made the step, but for the first passes."""
    run.synced_passes += 1
    if not run.sharded and run.synced_passes > warmup:
        run.optimizers[0].step()
    for scheduler in run.schedulers:
        metric = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
    if look:
        note_model(run)


def note_model(run: Run, stepped: bool = True) -> None:
    """Parameters and buffers. Buffers that forward has changed are each rank's own, but after a step of `shard`: that
    brings rank 0's to all, as DDP does before the next pass."""
    values = run.model.state_dict()  # waits for parameters that are still gathered
    buffers = dict(run.model.named_buffers())
    for name, value in values.items():
        if name not in buffers or run.keeps_buffers:
            run.note(name, value)
        elif stepped:
            copied = value.clone()
            if not run.sharded:
                dist.broadcast(copied, 0, group=run.group)
            run.note(name, copied)
        elif dist.get_rank() == 0:
            run.note(name, value)


def zero_grad(run: Run, by: str = "optimizer", to_none: bool = True) -> None:
    for optimizer in run.optimizers:
        if by == "optimizer" or hasattr(optimizer, "collect"):
            optimizer.zero_grad(set_to_none=to_none)
    if by == "model":
        run.model.zero_grad(set_to_none=to_none)
    if by == "hand":
        for param in run.model.parameters():
            param.grad = None


def edit_state(run: Run, how: str) -> None:
    """The same lines on both sides; a rank has state of what it owns."""
    params = list(run.model.parameters())
    for optimizer in run.optimizers:
        if how == "clear":
            optimizer.state.clear()
        elif how == "delete every other":
            for param in params[::2]:
                if param in optimizer.state:
                    del optimizer.state[param]
        elif how == "pop the first":
            optimizer.state.pop(params[0], None)
        else:
            for state in list(optimizer.state.values()):
                for key, value in list(state.items()):
                    if isinstance(value, Tensor) and key not in ("step", "mu_product"):
                        if how == "zero in place":
                            value.zero_()
                        elif how == "halve in place":
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
    """Parameters that were frozen, and in no group, train from now on."""
    block = run.model.get_submodule(name).requires_grad_(True)
    named = [(f"{name}.{rest}", param) for rest, param in block.named_parameters()]
    run.optimizers[0].add_param_group({"params": named, "lr": 0.02})
    run.frozen.discard(name)
    run.added.append(name)
    run.wrap(run.group)


def evaluate(run: Run, rank: int, size: int) -> None:
    """On one rank alone."""
    if dist.get_rank() == rank:
        run.model.eval()
        with torch.no_grad():
            dtype = next(run.model.parameters()).dtype
            run.note("evaluation", run.model(make_batch(500 + run.passes, size).to(dtype)))
        run.model.train()


def read_state(run: Run) -> None:
    """All optimizer state, on rank 0, by names of parameters; and all options."""
    for optimizer in run.optimizers:
        whole = optimizer.full_state_dict(to=0) if run.sharded else optimizer.state_dict()
        if dist.get_rank() == 0:
            for group in whole["param_groups"]:
                hidden = ("params", "param_names", "optimizer")
                run.note("options", {key: value for key, value in sorted(group.items()) if key not in hidden})
                for number, name in zip(group["params"], group["param_names"], strict=True):
                    run.note(f"state of {name}", dict(sorted(whole["state"].get(number, {}).items())))


def train_unevenly(run: Run, counts: tuple[int, ...], size: int) -> None:
    """Rank r has `counts[r]` inputs."""
    zero_grad(run)
    wrapped: list[Any] = [run.net] if isinstance(run.net, DistributedDataParallel) else []
    passes = run.passes
    with Join([*wrapped, *run.optimizers] if run.sharded else wrapped):
        for _ in range(counts[dist.get_rank()]):
            torch.autograd.backward(compute_loss(run, size))
            for optimizer in run.optimizers:
                optimizer.step()
            zero_grad(run)
    run.passes = passes + max(counts)
    if not run.sharded:  # a plain optimizer is up to date where it trained to the end
        for optimizer in run.optimizers:
            state = [optimizer.state_dict()]
            dist.broadcast_object_list(state, counts.index(max(counts)))
            optimizer.load_state_dict(state[0])
    run.wrap(run.group)  # buckets of a DDP that had no inputs are not those of the others
    note_model(run)


def restart(
    build: Callable[..., Run],
    run: Run,
    folder: str,
    via: str,
    group: dist.ProcessGroup | None = None,
) -> Run:
    """Save, build everything again with other values, load; on all ranks, or on those of `group`.

    The other side goes on with what it has; ranks that come back take everything from rank 0.
    """
    is_member = group is None or dist.get_rank() < dist.get_world_size(group)
    zero_grad(run)
    if not run.sharded:
        everything = [[part.state_dict() for part in [run.model, *run.optimizers, *run.schedulers]]]
        if group is None and run.group is not None:
            dist.broadcast_object_list(everything, 0)
        for part, state in zip([run.model, *run.optimizers, *run.schedulers], everything[0], strict=True):
            part.load_state_dict(state)  # also where nothing changes: loading casts state to the dtype of parameters
        run.group, run.is_member = group, is_member
        if is_member:
            run.wrap(group)
        return run
    saved: list[Any] = [None]
    if run.is_member:
        (optimizer,) = run.optimizers
        if via == "checkpoint":
            checkpoint.save(folder, step=run.passes, model=run.model, optimizer=optimizer, progress=False)
            saved = [[scheduler.state_dict() for scheduler in run.schedulers]]
        else:
            saved = [[run.model.state_dict(), optimizer.full_state_dict(to=0)]]
            saved[0] += [scheduler.state_dict() for scheduler in run.schedulers]
    dist.broadcast_object_list(saved, 0)
    fresh = build(True, seed=77, group=group, old=run) if is_member else run
    fresh.is_member, fresh.group = is_member, group
    if is_member:
        if via == "checkpoint":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other ranks have saved it
                checkpoint.load(folder, model=fresh.model, optimizer=fresh.optimizers[0], progress=False)
        else:
            fresh.model.load_state_dict(saved[0].pop(0))
            fresh.optimizers[0].load_state_dict(saved[0].pop(0))
        for scheduler, state in zip(fresh.schedulers, saved[0], strict=True):
            scheduler.load_state_dict(state)
    return fresh


def refuse(run: Run, what: str, call: Callable[[], object]) -> None:
    """All ranks must raise."""
    if not run.sharded:
        return
    try:
        call()
        raised = ""
    except Exception as error:
        raised = type(error).__name__
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, raised)
    assert all(everywhere), f"REFUSAL: {what} must raise on all ranks, got {everywhere}"


def step_with_other_options(run: Run) -> None:
    """Another learning rate on each rank."""
    group = run.optimizers[0].param_groups[0]
    before = group["lr"]
    group["lr"] = before + 0.01 * dist.get_rank()
    try:
        run.optimizers[0].step()
    finally:
        group["lr"] = before


def clip_by_torch_and_step(run: Run) -> None:
    """Gradients that other ranks have taken in are changed here."""
    torch.nn.utils.clip_grad_norm_(run.params(), 1e-6)
    run.optimizers[0].step()


def is_matrix(name: str, param: Tensor) -> bool:
    """What Muon updates."""
    return param.dim() == 2 and (".up." in name or ".down." in name)


def make_folder() -> str:
    folder = [tempfile.mkdtemp(prefix="zeroshard-program-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


def remove_folder(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


# ---- Comparison


def list_differences(
    found: list[tuple[str, Any]], expected: list[tuple[str, Any]], tolerances: dict[torch.dtype, tuple[float, float]]
) -> list[str]:
    """`tolerances`: by dtype, relative and absolute. Empty: every bit must be equal."""
    if [label for label, _ in found] != [label for label, _ in expected]:
        mine, theirs = ([label for label, _ in log] for log in (found, expected))
        odd = [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]][:1]
        return [f"{len(mine)} and {len(theirs)} values were recorded; the first different labels: {odd}"]
    texts = []
    for (label, ours), (_, theirs) in zip(found, expected, strict=True):
        text = describe_difference(ours, theirs, tolerances)
        if text:
            texts.append(f"{label}: {text}")
    return texts


def scale_tolerances(
    tolerances: dict[torch.dtype, tuple[float, float]], state: dict[Any, Any], key: Any
) -> dict[torch.dtype, tuple[float, float]]:
    """RMSprop's momentum holds updates before they are multiplied by the learning rate, which is 0.01."""
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
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return f"the largest difference is {(found.to(wide) - expected.to(wide)).abs().max().item():.3e}"


def judge(train: Callable[[bool], list[tuple[str, Any]]], tolerances: dict[torch.dtype, tuple[float, float]]) -> str:
    """ "same bits" or "within tolerance"; else raises on all ranks, with the first differences of each."""
    expected = train(False)
    found = train(True)
    is_same = not list_differences(found, expected, {})
    differences = list_differences(found, expected, tolerances)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (is_same, differences[:4]))
    if any(texts for _, texts in everywhere):
        texts = [f"  rank {rank}: {text}" for rank, (_, texts) in enumerate(everywhere) for text in texts]
        raise AssertionError("DIFFERENT: zeroshard and DDP with the plain optimizer disagree:\n" + "\n".join(texts))
    return "same bits" if all(same for same, _ in everywhere) else "within tolerance"
