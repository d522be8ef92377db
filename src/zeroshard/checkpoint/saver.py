"""Saving: everything beside, onto the disk, then visible at once; on all ranks or on none."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack

from .._logging import log_rank, warn_at_caller
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..comm.process_group import Group, resolve_group
from ..engine.base import Engine
from ..errors import CheckpointError, ConfigError
from ..profiling import Phase
from ..state.serialization import dumps, loads
from ..state.tensor_utils import collect_plain_tensors
from .directory import MANIFEST_FILE, CheckpointDir, ChecksummingFileSystem, Manifest, write_and_fsync
from .metadata import CheckpointMetadata, dcp_group_kwargs, format_failures, torch_reason
from .names import format_names, key_by_name, resolve_param_names
from .optimizer_adapter import copy_to_host, get_engine, make_adapter
from .progress import Progress, ProgressFn, check_components, errors_as_checkpoint_error, run_on_rank0

# ---------------------------------------------------------------------------------------------------------------------
# Parameters that a sharded optimizer divides among ranks: each rank writes and reads what it owns of them.


def collect_model_state(rank: int, model: torch.nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What a rank writes of a model: its parts of what is divided, and parameters that all have.

    Buffers, and what modules add, may differ between ranks: those of the first one count, as they do in training.
    """
    owned = ShardedParams(optimizer)
    found = get_model_state_dict(model)
    if rank:
        params = {storage_key(param) for param in model.parameters()}
        found = {name: it for name, it in found.items() if storage_key(it) in params or _has_dtensor(it)}
    return {
        name: owned.engine.shard_tensor(i) if (i := owned.find_index(it)) is not None else it
        for name, it in found.items()
    }


def _has_dtensor(value: Any) -> bool:
    return any(hasattr(tensor, "to_local") for tensor in collect_plain_tensors(value))


class ShardedParams:
    """Parameters found by where they lie: a model's dict has others over the same memory.

    Hazard: made before that dict is taken, since parameters whose memory was exchanged are moved back here.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._index_by_storage_key: dict[Any, int] = {}
        engine = get_engine(optimizer)
        if engine is not None:
            self.engine: Engine = engine
            self.engine.wait_until_idle()
            self._index_by_storage_key = {
                storage_key(param): index for index, param in enumerate(self.engine.params) if param.numel()
            }

    def __bool__(self) -> bool:
        return bool(self._index_by_storage_key)

    def find_index(self, value: Any) -> int | None:
        """The number of a parameter in the optimizer."""
        return self._index_by_storage_key.get(storage_key(value)) if self._index_by_storage_key else None


def storage_key(value: Any) -> object:
    """Where a tensor lies, the same for all that are over the same memory in the same way."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device


def choose_group(process_group: dist.ProcessGroup | None, optimizer: Optimizer | None) -> Group:
    """The ranks that save or load together: the given ones, else those of a sharded optimizer, else all."""
    engine = get_engine(optimizer)
    if process_group is None and engine is not None and dist.is_initialized():
        own = engine.comm.data_parallel.group
        if own.size < dist.get_world_size():
            return own
    # Hazard: where the optimizer has all ranks in a group of its own, one that forgot it still meets the others here.
    return resolve_group(process_group)


def check_optimizer_ranks(optimizer: Optimizer | None, group: Group, call: str) -> None:
    """A part of the ranks has a part of the state, and would wait for the others."""
    engine = get_engine(optimizer)
    if engine is None:
        return
    comm = engine.comm
    members = comm.data_parallel.group.members
    if sorted(members) != sorted(group.members):
        name = "process_group" if comm.replicas is None else "join_process_group"
        raise ConfigError(
            f"{call}() is called by ranks {group.members}, but the optimizer is sharded over ranks "
            f"{members}: give it process_group=optimizer.{name}"
        )


def check_state_on_all_owners(optimizer: Optimizer | None, comm: Comm) -> None:
    """Raise on all ranks if only some owners of a parameter have state of it, which files would have in part."""
    engine = get_engine(optimizer)
    if engine is None or comm.group.size == 1:
        return
    state, count = engine.state(), len(engine.params)
    flags = bytearray(2 * count)
    for index, param in engine.owned_params(engine.comm.group.rank).items():
        flags[index if state.get(param) else count + index] = 1
    both = comm.all_reduce_any(bytes(flags))
    torn = [engine.layout.params[index].label for index in range(count) if both[index] and both[count + index]]
    if torn:
        raise CheckpointError(
            f"some ranks have optimizer state of {format_names(torn)}, and others that own a part of it have none, as "
            "after a step that failed on one rank. Load a checkpoint before you save one."
        )


# ---------------------------------------------------------------------------------------------------------------------
# A rank's part of a checkpoint into its file, through `torch.distributed.checkpoint`.


class _SavePlanner(DefaultSavePlanner):
    """DCP copies what is a part of a larger storage, and keeps the copies until all is written. Slices of buckets are
    such parts; as tensors of their own, over the same memory, they are written as they lie."""

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
                f"{write_item.index.fqn} has changed its shape while it was saved: {tuple(planned.chunk.sizes)} was "
                f"planned, and now it is {tuple(data.shape)}"
            )
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu" and data.numel():
            with suppress(BufferError, RuntimeError):  # some dtypes and views cannot, and are copied
                return from_dlpack(data.detach())
        return data


def write_shards(comm: Comm, directory: Path, state_dict: dict[str, Any], progress: Progress) -> dict[str, int]:
    """The check sums of all files, whichever rank has written them."""
    files = ChecksummingFileSystem(progress)
    writer = FileSystemWriter(str(directory), sync_files=True, single_file_per_rank=True)
    writer.fs = files
    try:
        with comm.group.failure_detector, dcp_group_kwargs(comm.group) as ranks:
            dcp_save(state_dict, storage_writer=writer, planner=_SavePlanner(progress), **ranks)
    except CheckpointException as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {directory.parent}: {format_failures(error)}"
        ) from error
    progress.finish()
    mine = json.dumps(files.checksums)
    shares = [mine] if comm.group.size == 1 else comm.all_gather_text(mine)
    return {name: value for share in shares for name, value in json.loads(share).items()}


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint holds, as the nested dict that `torch.distributed.checkpoint` saves.
#
# model.<name>                   parameters and buffers
# optim.state.<name>.<key>       state, in the shape of its parameter, whoever holds which part of it
# optim.param_groups             options, with the names of parameters
# scheduler                      packed: read back without running code
# ranks.<rank>                   packed: what each rank has for itself, random states and `extra`


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
MODEL, OPTIM, SCHEDULER, RANKS = "model", "optim", "scheduler", "ranks"


def build_state_dict(
    rank: int, model: torch.nn.Module | None, optimizer: Optimizer | None, scheduler: Any, extra: Any
) -> dict[str, Any]:
    """All of it, with the tensors themselves and not copies."""
    contents: dict[str, Any] = {RANKS: {str(rank): to_byte_tensor({"random": get_rng_states(), "extra": extra})}}
    if model is not None:
        contents[MODEL] = collect_model_state(rank, model, optimizer)
    if optimizer is not None:
        contents[OPTIM] = key_by_name(make_adapter(optimizer).local_state_dict(), resolve_param_names(optimizer, model))
    if scheduler is not None and rank == 0:
        contents[SCHEDULER] = to_byte_tensor(scheduler.state_dict())
    return {key: ensure_loadable(value, key) for key, value in contents.items()}


def ensure_loadable(value: Any, key_path: str) -> Any:
    """The value with numbers of numpy as plain ones. Raises if something in it could not be read back."""
    if isinstance(value, dict):
        return {key: ensure_loadable(it, f"{key_path}.{key}") for key, it in value.items()}
    if type(value) in (list, tuple):
        return type(value)(ensure_loadable(it, f"{key_path}.{number}") for number, it in enumerate(value))
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
            f"{key_path} is a {type(value).__qualname__}, which could not be read back: files are read without running "
            "code. Use numbers, strings, tensors and plain containers, or allow the type with "
            "torch.serialization.add_safe_globals."
        ) from error
    return value


def to_byte_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def from_byte_tensor(tensor: Any, key: str, directory: Path) -> Any:
    """What was packed, read from the entry `key`. Whatever bytes these are, no code is run."""
    try:
        return loads(tensor_to_bytes(tensor))
    except Exception as error:
        raise CheckpointError(f"'{key}' in {directory} cannot be read: {torch_reason(error)}") from error


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Without numpy, which torch can do without."""
    buffer = bytearray(tensor.numel())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(tensor)
    return bytes(buffer)


def get_rng_states() -> dict[str, Any]:
    """Of this process. CUDA's are those of the present device, if it was used."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_rng_states(states: dict[str, Any]) -> None:
    """Raise if they could not be set."""
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
# Saving: everything beside, onto the disk, then visible at once; on all ranks or on none.


_pending_saves: list["SaveHandle"] = []
"""The last save in the background, to whatever folder: one at a time, so that their messages do not meet either."""


class SaveHandle:
    """A save in the background, which `async_save` returns."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._finished = threading.Event()
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._is_failure_reported = False

    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that this rank has written, and those that it writes in all, once that is known."""
        return self._progress.done_bytes, self._progress.total_bytes

    def wait(self) -> Path:
        """The directory of the checkpoint, once it is complete. Raises what failed, on all ranks."""
        self._finished.wait()
        if self._failure is not None:
            self._is_failure_reported = True
            raise self._failure
        assert self._path is not None
        return self._path

    def _wait_until_done(self) -> None:
        """It is over, in whatever way."""
        self._finished.wait()

    def _wait_and_raise_unreported(self) -> None:
        """For the next save. Raises what failed if nobody has heard of it."""
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
        if self._failure is not None:  # it may be the last thing that this process does
            log_rank(logging.ERROR, rank, "a checkpoint was not saved: %s", self._failure)


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
    """Save a checkpoint into the folder `path`. Called on all ranks of `process_group`; all succeed or all raise.

    Each rank writes its own parts and nothing is gathered. The checkpoint appears as `path/step-...` when it is
    complete and on the disk; until then the one before is the latest.

    Args:
        path: a folder for the checkpoints of one job.
        step: the number of the step, which names the checkpoint.
        model: the model, also one that DDP wraps or FSDP2 has sharded.
        optimizer: one of ours, a plain one, or one over FSDP2's parameters.
        scheduler: anything with `state_dict()`.
        extra: what else this rank wants back, of tensors, numbers, strings and plain containers: its position in the
            data, for example. Random states of torch and Python are saved for each rank in any case.
        keep: how many checkpoints stay; None for all.
        progress: show a line on rank 0; by default if somebody sits at the terminal and it takes a while. Or what is
            to be called on each rank with the bytes that it has written and those that it writes in all.
        process_group: the ranks that save together; by default those of a sharded `optimizer`, else all.

    Returns:
        The directory of the checkpoint.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, given, extra, False, _shown(step, progress, comm))
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

    Called on all ranks of `process_group`, with the arguments of `save`. The next save waits for this one. Wait for the
    last one before the process group is destroyed.

    Returns:
        A handle. Its `wait()` returns the directory of the checkpoint, or raises what failed. If nobody waits, the next
        save raises it.
    """
    comm = Comm(choose_group(process_group, optimizer))
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    request = _SaveRequest(path, step, keep, given, extra, True, _shown(step, progress, comm))
    return request.start(comm, request.collect(comm))


def _shown(step: int, progress: bool | ProgressFn | None, comm: Comm) -> Progress:
    return Progress(f"saving step {step}", progress, comm.group.rank)


@dataclass(frozen=True)
class _SaveRequest:
    path: str | os.PathLike[str]
    step: int
    keep: int | None
    components: dict[str, Any]
    extra: Any
    is_async: bool
    progress: Progress

    def collect(self, comm: Comm) -> dict[str, Any]:
        """What this rank saves, once all ranks agree."""
        with errors_as_checkpoint_error(self.path), comm.profiler.phase(Phase.SAVE_COLLECT):
            contents = prepare_all(comm, "checkpoint.save", lambda: self._propose(comm))
            check_state_on_all_owners(self.components["optimizer"], comm)
        return contents

    def _propose(self, comm: Comm) -> Prepared[dict[str, Any]]:
        check_components(self.components, "state_dict", self.progress.show)
        _finish_pending_saves()
        _check_step_and_keep(self.step, self.keep)
        _check_numpy(comm)
        facts = [f"path {Path(self.path)}", f"step {self.step}", f"keep={self.keep}"]
        facts.append(f"checkpoint.{'async_save' if self.is_async else 'save'}")
        facts += [f"{name} {'not ' if it is None else ''}given" for name, it in self.components.items()]
        check_optimizer_ranks(self.components["optimizer"], comm.group, "checkpoint.save")
        contents = build_state_dict(comm.group.rank, **self.components, extra=self.extra)
        return Prepared(copy_to_host(contents) if self.is_async else contents, facts)

    def start(self, comm: Comm, state_dict: dict[str, Any]) -> SaveHandle:
        saving = SaveHandle(self.progress)
        companion = Comm(comm.group.dedicated_gloo_group())
        _pending_saves.append(saving)
        job = (lambda: self.write(companion, state_dict), comm.group.rank)
        threading.Thread(target=saving._run_in_background, args=job, name="zeroshard-save", daemon=False).start()
        return saving

    def write(self, comm: Comm, contents: dict[str, Any]) -> Path:
        folder = CheckpointDir(self.path)
        with errors_as_checkpoint_error(folder.path), ExitStack() as held:

            def begin() -> Path:
                held.enter_context(folder.lock())
                directory = folder.create_staging_dir(self.step)
                held.callback(folder.discard, directory)  # does nothing once it is published
                return directory

            def publish() -> Path:
                manifest = Manifest(self.step, comm.group.size, sums, time.time(), torch.__version__)
                write_and_fsync(directory / MANIFEST_FILE, manifest.to_json())
                CheckpointMetadata(directory).check_files()  # one that cannot be loaded must not push others out
                final = folder.publish(directory, self.step)
                prune()
                return final

            def prune() -> None:
                try:
                    folder.prune(self.keep)
                except OSError as error:
                    warn_at_caller(f"older checkpoints in {folder.path} could not be removed: {error}")

            directory = run_on_rank0(comm, "checkpoint.save: beginning", begin)
            with comm.profiler.phase(Phase.SAVE_WRITE):
                sums = write_shards(comm, directory, contents, self.progress)
            with comm.profiler.phase(Phase.SAVE_PUBLISH):
                final = run_on_rank0(comm, "checkpoint.save: publishing", publish)
            log_rank(
                logging.DEBUG,
                comm.group.rank,
                "saved %s, of which this rank wrote %d bytes",
                final,
                self.progress.done_bytes,
            )
            return final


def _check_step_and_keep(step: int, keep: int | None) -> None:
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be a number of steps, not {step!r}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep must be at least 1, or None to keep all checkpoints, not {keep!r}")


def _check_numpy(comm: Comm) -> None:
    """By which torch's checkpoints exchange their plans. Without it a rank would fail while others wait for it."""
    if comm.group.size > 1 and find_spec("numpy") is None:
        raise ConfigError("saving on several ranks takes numpy, which torch.distributed.checkpoint uses: install it")


def _finish_pending_saves() -> None:
    while _pending_saves:
        _pending_saves.pop()._wait_and_raise_unreported()


def wait_for_pending_saves() -> None:
    """What was saved in the background is there, or has failed, which the next save tells."""
    for saving in _pending_saves:
        saving._wait_until_done()
