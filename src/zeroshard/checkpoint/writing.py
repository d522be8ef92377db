"""A rank's part of a checkpoint into its file, through `torch.distributed.checkpoint`."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils.dlpack import from_dlpack

from ..comm.collectives import Comm
from ..errors import CheckpointError
from .metadata import dcp_group_kwargs, format_failures
from .directory import ChecksummingFileSystem
from .progress import Progress


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
