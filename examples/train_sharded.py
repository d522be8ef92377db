"""A complete training script with `zeroshard.shard`. Run it again, on any number of ranks, to resume.

torchrun --nproc-per-node 2 examples/train_sharded.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroshard
from zeroshard import checkpoint

FOLDER = "checkpoints"
STEPS = 20
PASSES = 4  # backward passes for each step

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")

model = nn.Sequential(nn.Linear(32, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 1)).to(device)  # no DDP
decay = [param for param in model.parameters() if param.dim() > 1]
no_decay = [param for param in model.parameters() if param.dim() <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = zeroshard.shard(model, torch.optim.AdamW, params=groups, lr=3e-3)
scheduler = CosineAnnealingLR(optimizer, T_max=10 * STEPS)

if checkpoint.latest(FOLDER):  # on all ranks, as many as there are now
    checkpoint.load(FOLDER, model=model, optimizer=optimizer, scheduler=scheduler)

torch.manual_seed(1000 * scheduler.last_epoch + dist.get_rank())  # other inputs on each rank
for _ in range(STEPS):
    for number in range(1, PASSES + 1):
        inputs = torch.randn(64, 32, device=device)
        # Without no_sync every pass is reduced, and gradients never take more than 1/N of their size.
        with optimizer.no_sync() if number < PASSES else nullcontext():
            loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
            (loss / PASSES).backward()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()

# On all ranks: each writes its own part, and nothing is gathered.
checkpoint.save(FOLDER, step=scheduler.last_epoch, model=model, optimizer=optimizer, scheduler=scheduler)
if dist.get_rank() == 0:
    print(f"step {scheduler.last_epoch}: loss {loss.item():.4f}, norm of the gradients {norm.item():.4f}")
dist.destroy_process_group()
