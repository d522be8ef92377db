"""The contestants: a GPT and its AdamW state, sharded by three libraries, each with its own checkpoint format."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.gpt import Block
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from zeroshard import checkpoint, shard

from ..harness.workloads import LanguageModel

ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}
SIZES = {
    "100M": {"vocabulary": 20_000, "context": 128, "width": 768, "heads": 12, "layers": 12},
    "tiny": {"vocabulary": 50, "context": 16, "width": 32, "heads": 2, "layers": 2},
}
Wait = Callable[[], object]


class Peer(ABC):
    """A model and an optimizer after one step. Call all methods on all ranks."""

    optimizer: Any

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(**SIZES[size])
        self.shard_model()
        self.model(torch.arange(9)[None]).backward()  # equal on all ranks, so no contestant needs DDP
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abstractmethod
    def shard_model(self) -> None:
        """Shard the model and make the optimizer."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    @abstractmethod
    def load(self, folder: Path) -> None: ...

    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors of this rank except scalars."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        state = [value for state in inner.state.values() for value in state.values()]
        for tensor in (*self.model.parameters(), *state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.dim() > 0:
                yield local.detach()

    def digest(self) -> float:
        return sum(float(tensor.norm(dtype=torch.float64)) for tensor in self.tensors())

    def zero_tensors(self) -> None:
        """Overwrite all tensors with zeros."""
        for tensor in self.tensors():
            tensor.zero_()


class AsyncPeer(Peer):
    """A contestant with asynchronous saves."""

    @abstractmethod
    def async_save(self, folder: Path) -> Wait:
        """Start a save. Return a function that waits until it is complete."""


class Ours(AsyncPeer):
    """`zeroshard.shard` as ZeRO-2 with flat shards, and `zeroshard.checkpoint`, which always syncs its files."""

    def shard_model(self) -> None:
        self.optimizer = shard(self.model, AdamW, **ADAMW)

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, step=1, model=self.model, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, model=self.model, optimizer=self.optimizer)

    def async_save(self, folder: Path) -> Wait:
        return checkpoint.async_save(folder, step=2, model=self.model, optimizer=self.optimizer).wait


class Fsdp2(AsyncPeer):
    """`fully_shard`, and torch's helpers with DCP: one synced file per rank."""

    def shard_model(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        for module in (*blocks, self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), **ADAMW)
        # Hazard: an asynchronous save needs its own process group, or its messages would mix with those of training.
        self._async_group = dist.new_group()

    def save(self, folder: Path) -> None:
        dcp_save(self._parts(), storage_writer=_writer(folder))

    def load(self, folder: Path) -> None:
        parts = self._parts()
        dcp_load(parts, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])

    def async_save(self, folder: Path) -> Wait:
        future: Any = dcp_async_save(
            self._parts(), storage_writer=_writer(folder / "later"), process_group=self._async_group
        )
        return future.result  # type: ignore[no-any-return]

    def _parts(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}


class TorchZeroPeer(Peer):
    """torch's class. Rank 0 gathers everything and writes one synced file; every rank reads all of it."""

    def shard_model(self) -> None:
        self.optimizer = TorchZero(self.model.parameters(), AdamW, **ADAMW)

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            with self._file(folder).open("wb") as file:
                torch.save({"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, folder: Path) -> None:
        saved = torch.load(self._file(folder), map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optim"])

    def _file(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "all.pt"


OURS, FSDP2, TORCH_ZERO = "zeroshard", "FSDP2 with DCP", "torch ZeRO"
PEERS: dict[str, Callable[[str], Peer]] = {OURS: Ours, FSDP2: Fsdp2, TORCH_ZERO: TorchZeroPeer}


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
