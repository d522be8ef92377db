"""`save` and `async_save`: each rank writes its shards to a staging directory, then rank 0 publishes it atomically.

The checkpoint is a nested dict, written by DCP (`torch.distributed.checkpoint`)::

    model.<name>                 parameters and buffers
    optim.state.<name>.<key>     optimizer state, in the shape of its parameter, independent of the sharding
    optim.param_groups           options, with parameter names
    scheduler                    serialized: loads without executing code
    ranks.<rank>                 serialized: RNG states and `extra` of each rank

All ranks succeed or all raise.
"""

import io
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack

from .._formatting import format_names
from .._logging import log_rank, warn_at_caller
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..comm.process_group import Group, resolve_group
from ..engine.base import Engine
from ..errors import CheckpointError, ConfigError
from ..profiling import Phase, label_phase
from ..state.serialization import dumps, loads
from ..state.tensor_utils import collect_plain_tensors
from .directory import MANIFEST_FILE, CheckpointDir, ChecksummingFileSystem, Manifest, write_and_fsync
from .metadata import CheckpointMetadata, dcp_group_kwargs, format_failures, torch_reason
from .names import key_by_name, resolve_param_names, tied_param_names
from .optimizer_adapter import copy_to_host, get_engine, make_adapter
from .progress import Progress, ProgressFn, check_components, errors_as_checkpoint_error, run_on_rank0

# ---------------------------------------------------------------------------------------------------------------------
# Model: each rank writes the shards of parameters that it owns.


def collect_model_state(rank: int, model: torch.nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the part of the model that this rank writes: its shards, and all replicated parameters.

    Buffers and extra state may differ between ranks; rank 0 writes its own, as `broadcast_buffers` does in training.
    """
    sharded_params = ShardedParams(optimizer)
    state = get_model_state_dict(model)
    if rank:
        params = {storage_key(param) for param in model.parameters()}
        state = {name: value for name, value in state.items() if storage_key(value) in params or _has_dtensor(value)}
    return {
        name: sharded_params.engine.params.shard_tensor(index)
        if (index := sharded_params.find_index(value)) is not None
        else value
        for name, value in state.items()
    }


def _has_dtensor(value: Any) -> bool:
    return any(hasattr(tensor, "to_local") for tensor in collect_plain_tensors(value))


class ShardedParams:
    """Finds a sharded optimizer's parameters by memory, since a model's state dict has other tensors over it.

    Hazard: create this before taking the model's state dict: `wait_until_idle` moves parameters whose memory was
    replaced back into their buckets.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._index_by_storage_key: dict[Any, int] = {}
        engine = get_engine(optimizer)
        if engine is not None:
            self.engine: Engine = engine
            self.engine.param_sync.wait_until_idle()
            self._index_by_storage_key = {
                storage_key(param): index for index, param in enumerate(self.engine.params.tensors) if param.numel()
            }

    def __bool__(self) -> bool:
        return bool(self._index_by_storage_key)

    def find_index(self, value: Any) -> int | None:
        """Return the index of the parameter that shares memory with `value`, or None."""
        return self._index_by_storage_key.get(storage_key(value)) if self._index_by_storage_key else None


def storage_key(value: Any) -> object:
    """Return a key that is equal for tensors with the same memory, shape, strides and dtype; None for others."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device


def choose_group(process_group: dist.ProcessGroup | None, optimizer: Optimizer | None) -> Group:
    """Return the ranks that save or load: `process_group`, else those of a sharded optimizer, else all."""
    engine = get_engine(optimizer)
    if process_group is None and engine is not None and dist.is_initialized():
        group = engine.comm.data_parallel.group
        if group.size < dist.get_world_size():
            return group
    # Hazard: an optimizer over all ranks may use its own group. Use the default group all the same: a rank that forgot
    # to pass the optimizer then meets the others, and raises an error instead of hanging.
    return resolve_group(process_group)


def check_optimizer_ranks(optimizer: Optimizer | None, group: Group, call: str) -> None:
    """Raise `ConfigError` unless `group` has exactly the ranks that the optimizer is sharded over.

    Fewer ranks would have only part of the state, or hang in a collective.
    """
    engine = get_engine(optimizer)
    if engine is None:
        return
    comm = engine.comm
    members = comm.data_parallel.group.members
    if sorted(members) != sorted(group.members):
        name = "process_group" if comm.replicas is None else "join_process_group"
        raise ConfigError(
            f"{call}() expects the ranks that the optimizer is sharded over, {members}, got {group.members}. "
            f"Pass process_group=optimizer.{name}."
        )


def check_state_on_all_owners(optimizer: Optimizer | None, comm: Comm) -> None:
    """Raise `CheckpointError` if only some owners of a parameter have state for it. Call on all ranks; all raise.

    The checkpoint would hold only part of that state.
    """
    engine = get_engine(optimizer)
    if engine is None or comm.group.size == 1:
        return
    state, count = engine.state.view(), len(engine.params.tensors)
    flags = bytearray(2 * count)
    for index, param in engine.params.owned_by(engine.comm.group.rank).items():
        flags[index if state.get(param) else count + index] = 1
    any_rank = comm.all_reduce_any(bytes(flags))
    partial = [
        engine.layout.params[index].label for index in range(count) if any_rank[index] and any_rank[count + index]
    ]
    if partial:
        raise CheckpointError(
            f"only some owners of {format_names(partial)} have optimizer state for it, probably because a step failed "
            "on one rank. Load a checkpoint before you save."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Writing one file per rank through DCP.


class _SavePlanner(DefaultSavePlanner):
    """Writes slices of buckets without copying them.

    DCP copies tensors that are views of a larger storage, and keeps all copies until everything is written. Through
    DLPack a slice becomes a tensor with a storage of its own over the same memory.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._progress.add_expected(sum(item.tensor_storage_size() or 0 for item in plan.items))
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        planned = write_item.tensor_data
        if planned is not None and isinstance(data, torch.Tensor) and data.shape != planned.chunk.sizes:
            raise CheckpointError(
                f"{write_item.index.fqn} changed its shape during the save: expected {tuple(planned.chunk.sizes)}, got "
                f"{tuple(data.shape)}. Do not modify tensors while they are saved."
            )
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu" and data.numel():
            with suppress(BufferError, RuntimeError):  # dtypes and views that DLPack does not support are copied
                return from_dlpack(data.detach())
        return data


def write_shards(comm: Comm, directory: Path, state_dict: dict[str, Any], progress: Progress) -> dict[str, int]:
    """Write this rank's state dict, and return the checksums of all ranks' files. Call on all ranks."""
    files = ChecksummingFileSystem(progress)
    writer = FileSystemWriter(str(directory), sync_files=True, single_file_per_rank=True)
    writer.fs = files
    try:
        with comm.group.failure_detector, dcp_group_kwargs(comm.group) as group_kwargs:
            dcp_save(state_dict, storage_writer=writer, planner=_SavePlanner(progress), **group_kwargs)
    except CheckpointException as error:
        raise CheckpointError(
            f"writing the checkpoint to {directory.parent} failed: {format_failures(error)}"
        ) from error
    progress.finish()
    own = json.dumps(files.checksums)
    by_rank = [own] if comm.group.size == 1 else comm.all_gather_text(own)
    return {name: checksum for checksums in by_rank for name, checksum in json.loads(checksums).items()}


# ---------------------------------------------------------------------------------------------------------------------
# Contents of a checkpoint.


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
MODEL, OPTIM, SCHEDULER, RANKS = "model", "optim", "scheduler", "ranks"


def build_state_dict(
    rank: int, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any, extra: Any
) -> dict[str, Any]:
    """Return this rank's part of the checkpoint. Its tensors are not copies."""
    contents: dict[str, Any] = {RANKS: {str(rank): to_byte_tensor({"random": get_rng_states(), "extra": extra})}}
    if model is not None:
        contents[MODEL] = collect_model_state(rank, model, optimizer)
    if optimizer is not None:
        contents[OPTIM] = key_by_name(make_adapter(optimizer).local_state_dict(), resolve_param_names(optimizer, model))
    if scheduler is not None and rank == 0:
        contents[SCHEDULER] = to_byte_tensor(scheduler.state_dict())
    return {key: ensure_loadable(value, key) for key, value in contents.items()}


def describe_components(model: torch.nn.Module | None, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the manifest's fields about model and optimizer: classes, and names of tied weights."""
    unwrapped: Any = model
    while isinstance(unwrapped, DistributedDataParallel) or hasattr(unwrapped, "_orig_mod"):
        unwrapped = unwrapped.module if isinstance(unwrapped, DistributedDataParallel) else unwrapped._orig_mod
    return {
        "model": None if model is None else type(unwrapped).__name__,
        "optimizers": [] if optimizer is None else make_adapter(optimizer).class_names,
        "tied": {} if model is None else tied_param_names(model),
    }


def ensure_loadable(value: Any, key_path: str) -> Any:
    """Return `value` with numpy scalars as Python numbers.

    Raises:
        CheckpointError: a value could not be loaded with `weights_only=True`.
    """
    if isinstance(value, dict):
        return {key: ensure_loadable(element, f"{key_path}.{key}") for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(ensure_loadable(element, f"{key_path}.{index}") for index, element in enumerate(value))
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN_TYPES:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{key_path} is a {type(value).__qualname__}, which load() could not read without running code. Save "
            "numbers, strings, tensors and containers, or allow the type with torch.serialization.add_safe_globals."
        ) from error
    return value


def to_byte_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def from_byte_tensor(tensor: Any, key: str, directory: Path) -> Any:
    """Deserialize the entry `key` without executing code, whatever its bytes. Raises `CheckpointError`."""
    try:
        return loads(tensor_to_bytes(tensor))
    except Exception as error:
        raise CheckpointError(f"'{key}' in {directory} cannot be read: {torch_reason(error)}") from error


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a uint8 tensor."""
    return bytes(tensor.numpy())


def get_rng_states() -> dict[str, Any]:
    """Return the RNG states of torch and Python, and of the current CUDA device if CUDA is initialized."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_rng_states(states: dict[str, Any]) -> None:
    """Raise if `set_rng_states` would fail."""
    torch.Generator().set_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# ---------------------------------------------------------------------------------------------------------------------
# save, async_save.


_pending_saves: list["SaveHandle"] = []
"""The last background save, to any folder. Only one runs at a time: collectives of two saves must not mix."""


class SaveHandle:
    """Handle of a background save; returned by `async_save`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._finished = threading.Event()
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._is_failure_reported = False

    def done(self) -> bool:
        """Return whether the save has completed or failed."""
        return self._finished.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written, and its total; the total is 0 until the save is planned."""
        return self._progress.done_bytes, self._progress.total_bytes

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its directory. Raises on all ranks if the save failed."""
        self._finished.wait()
        if self._failure is not None:
            self._is_failure_reported = True
            raise self._failure
        assert self._path is not None
        return self._path

    def _wait_until_done(self) -> None:
        """Wait until the save has completed or failed, without raising."""
        self._finished.wait()

    def _wait_and_raise_unreported(self) -> None:
        """Wait, and raise a failure that `wait` has not raised yet. For the next save."""
        self._finished.wait()
        if not self._is_failure_reported:
            self.wait()

    def _run(self, write_checkpoint: Callable[[], Path]) -> None:
        try:
            self._path = write_checkpoint()
        except BaseException as error:
            self._failure = error
        self._finished.set()

    def _run_in_background(self, write_checkpoint: Callable[[], Path], rank: int) -> None:
        self._run(write_checkpoint)
        if self._failure is not None:  # logged, since the process may exit before anyone calls wait()
            log_rank(logging.ERROR, rank, "saving a checkpoint in the background failed: %s", self._failure)


def save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    progress: bool | ProgressFn | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint into the folder `path`. Call on all ranks of `process_group`; all succeed or all raise.

    Each rank writes its own shards; nothing is gathered. The checkpoint appears as `path/step-...` once it is complete
    and on disk. Until then the previous one remains the latest.

    Args:
        path: A folder for the checkpoints of one job.
        step: The training step, which names the checkpoint.
        model: The model; may be wrapped in DDP or sharded by FSDP2.
        optimizer: A sharded optimizer, a plain one, or one over FSDP2's parameters.
        scheduler: Any object with `state_dict()`.
        extra: Further state of this rank, such as its position in the data: tensors, numbers, strings and plain
            containers. RNG states of torch and Python are always saved for each rank.
        keep: Number of checkpoints to keep; None keeps all.
        progress: True shows a progress line on rank 0. None shows it if stderr is a terminal and the save takes more
            than a second. A function is called on each rank with the bytes it has written and its total.
        process_group: The ranks that save; default: those of a sharded `optimizer`, else all.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: The checkpoint could not be written. Nothing is published.
        ConfigError: An argument is invalid.
        RankMismatchError: The ranks passed different arguments.
    """
    comm = Comm(choose_group(process_group, optimizer))
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, components, extra, False, _make_progress(step, progress, comm))
    return request.write(comm, request.collect(comm))


def async_save(
    path: str | os.PathLike[str],
    *,
    step: int,
    model: torch.nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    progress: bool | ProgressFn | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Copy a checkpoint to host memory and write it in the background, while training continues.

    Call on all ranks of `process_group`, with the arguments of `save`. The next save waits for this one. Wait for the
    last one before destroying the process group.

    Returns:
        A handle. Its `wait()` returns the directory of the checkpoint, or raises if the save failed. A failure that
        `wait()` has not raised is raised by the next save.
    """
    comm = Comm(choose_group(process_group, optimizer))
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, components, extra, True, _make_progress(step, progress, comm))
    return request.start(comm, request.collect(comm))


def _make_progress(step: int, progress: bool | ProgressFn | None, comm: Comm) -> Progress:
    return Progress(f"saving step {step}", progress, comm.group.rank)


class _Collected(NamedTuple):
    """What this rank saves."""

    state_dict: dict[str, Any]
    description: dict[str, Any]
    """Fields of the manifest."""


@dataclass(frozen=True)
class _SaveRequest:
    path: str | os.PathLike[str]
    step: int
    keep: int | None
    components: dict[str, Any]
    extra: Any
    is_async: bool
    progress: Progress

    def collect(self, comm: Comm) -> _Collected:
        """Check that all ranks agree, and return what this rank saves. Call on all ranks."""
        with errors_as_checkpoint_error(self.path), label_phase(Phase.SAVE_COLLECT):
            collected = prepare_all(comm, "checkpoint.save", lambda: self._propose(comm))
            check_state_on_all_owners(self.components["optimizer"], comm)
        return collected

    def _propose(self, comm: Comm) -> Prepared[_Collected]:
        check_components(self.components, "state_dict", self.progress.show)
        _finish_pending_saves()
        _check_step_and_keep(self.step, self.keep)
        must_match = [f"path {Path(self.path)}", f"step {self.step}", f"keep={self.keep}"]
        must_match.append(f"checkpoint.{'async_save' if self.is_async else 'save'}")
        must_match += [f"{name} {'not ' if value is None else ''}given" for name, value in self.components.items()]
        check_optimizer_ranks(self.components["optimizer"], comm.group, "checkpoint.save")
        state_dict = build_state_dict(comm.group.rank, **self.components, extra=self.extra)
        description = describe_components(self.components["model"], self.components["optimizer"])
        return Prepared(_Collected(copy_to_host(state_dict) if self.is_async else state_dict, description), must_match)

    def start(self, comm: Comm, collected: _Collected) -> SaveHandle:
        """Run `write` in a background thread, with a process group of its own. Call on all ranks."""
        handle = SaveHandle(self.progress)
        background_comm = Comm(comm.group.background_group())
        _pending_saves.append(handle)
        args = (lambda: self.write(background_comm, collected), comm.group.rank)
        threading.Thread(target=handle._run_in_background, args=args, name="zeroshard-save", daemon=False).start()
        return handle

    def write(self, comm: Comm, collected: _Collected) -> Path:
        """Write the checkpoint, publish it, and remove old ones. Call on all ranks; all succeed or all raise."""
        folder = CheckpointDir(self.path)
        with errors_as_checkpoint_error(folder.path), ExitStack() as stack:

            def begin() -> Path:
                stack.enter_context(folder.lock())
                directory = folder.create_staging_dir(self.step)
                stack.callback(folder.discard, directory)  # no effect after the rename
                return directory

            def publish() -> Path:
                saved_at, description = time.time(), collected.description
                manifest = Manifest(self.step, comm.group.size, sums, saved_at, torch.__version__, **description)
                write_and_fsync(directory / MANIFEST_FILE, manifest.to_json())
                CheckpointMetadata(directory).check_files()  # a broken checkpoint must not replace a good one
                final = folder.publish(directory, self.step)
                prune()
                return final

            def prune() -> None:
                try:
                    folder.prune(self.keep)
                except OSError as error:
                    warn_at_caller(f"removing older checkpoints in {folder.path} failed: {error}")

            directory = run_on_rank0(comm, "checkpoint.save: creating the staging directory", begin)
            with label_phase(Phase.SAVE_WRITE):
                sums = write_shards(comm, directory, collected.state_dict, self.progress)
            with label_phase(Phase.SAVE_PUBLISH):
                final = run_on_rank0(comm, "checkpoint.save: publishing", publish)
            log_rank(
                logging.DEBUG,
                comm.group.rank,
                "saved %s; this rank wrote %d bytes",
                final,
                self.progress.done_bytes,
            )
            return final


def _check_step_and_keep(step: int, keep: int | None) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(f"expected step to be an integer of at least 0, got {step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(
            f"expected keep to be an integer of at least 1, or None to keep all checkpoints, got {keep!r}"
        )


def _finish_pending_saves() -> None:
    while _pending_saves:
        _pending_saves.pop()._wait_and_raise_unreported()


def wait_for_pending_saves() -> None:
    """Wait until background saves have completed or failed. The next save raises their failures."""
    for handle in _pending_saves:
        handle._wait_until_done()
