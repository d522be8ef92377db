"""What a rank knows of itself, before it has said a word to others."""

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from .. import __version__

_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_", "NVIDIA_TF32_")
_VARIABLE_NAMES = ("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class GpuInfo:
    """The one that a rank would use."""

    index: int
    name: str
    identity: str
    """Of the thing itself, whatever a process calls it."""
    free: int
    total: int


@dataclass(frozen=True)
class RankInfo:
    """Of one rank. Memory in bytes."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    backend: str
    """The one that was asked for, or nothing."""
    versions: Mapping[str, str]
    gpu: GpuInfo | None
    gpu_trouble: str
    """Why it could not be looked at."""
    host_free: int
    host_total: int
    cores: tuple[int, ...]
    """Those that the process may run on."""
    threads: int
    environment: Mapping[str, str]
    settings: Mapping[str, str]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankInfo":
        """From JSON."""
        gpu = values["gpu"] and GpuInfo(**values["gpu"])
        return cls(**{**values, "gpu": gpu, "cores": tuple(values["cores"])})


def collect_rank_info(rank: int, backend: str) -> RankInfo:
    """`backend`: what was asked for. Fails on no rank alone: what cannot be found out is said instead."""
    local_rank, local_size = (_int_from_env(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    gpu, trouble = (None, "") if backend == "gloo" else _probe_gpu(local_rank if local_rank >= 0 else rank)
    free, total = _read_host_memory()
    return RankInfo(
        rank=rank,
        host=socket.gethostname(),
        local_rank=local_rank,
        local_size=local_size,
        backend=backend,
        versions=_collect_versions(),
        gpu=gpu,
        gpu_trouble=trouble,
        host_free=free,
        host_total=total,
        cores=_available_cores(),
        threads=torch.get_num_threads(),
        environment=_collect_environment(),
        settings=_collect_torch_settings(),
    )


def _int_from_env(name: str) -> int:
    """-1 where it is not set."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def _collect_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": __version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _probe_gpu(local_rank: int) -> tuple[GpuInfo | None, str]:
    if not torch.cuda.is_available():
        return None, ""
    index = local_rank % torch.cuda.device_count()
    try:
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        return GpuInfo(index, properties.name, str(properties.uuid), free, total), ""
    except (RuntimeError, AssertionError) as error:
        return None, f"cuda:{index}: {error}".partition("\n")[0]


def _read_host_memory() -> tuple[int, int]:
    """Free and total; zeros where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            said = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return said["MemAvailable"], said["MemTotal"]
    except (OSError, KeyError, ValueError):
        return 0, 0


def _available_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _collect_environment() -> dict[str, str]:
    chosen = (name for name in os.environ if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES)
    return {name: os.environ[name] for name in sorted(chosen)}


def _collect_torch_settings() -> dict[str, str]:
    """Those of torch that change what it computes."""
    return {
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "default dtype": str(torch.get_default_dtype()),
    }
