"""How all examples join the ranks that torchrun has started."""

import os

import torch
import torch.distributed as dist


def join_group() -> torch.device:
    """The device of this rank: a GPU and NCCL where there are GPUs, else the CPU and gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
