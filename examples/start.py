"""Initialize the process group under torchrun."""

import os

import torch
import torch.distributed as dist


def join_group() -> torch.device:
    """Initialize the process group, with NCCL on GPUs and gloo on CPUs, and return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
