"""Train in an Accelerate loop with a sharded optimizer. Run it again, on any number of ranks, to resume.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from zeroshard.integrations.accelerate import Accelerator  # the only changed line

FOLDER = Path("checkpoints-accelerate")
PASSES = 2  # backward passes per step

torch.manual_seed(0)
inputs = torch.randn(960, 32)
data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
model = nn.Sequential(nn.Linear(32, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = CosineAnnealingLR(optimizer, T_max=200)

batches = DataLoaderConfiguration(split_batches=True)  # 48 samples per pass, over all ranks
on_cpu = not torch.cuda.is_available()
accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=PASSES, dataloader_config=batches)
prepared = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=48), scheduler)
model, optimizer, loader, scheduler = prepared
if FOLDER.exists():
    accelerator.load_state(str(FOLDER))

for batch, target in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

accelerator.save_state(str(FOLDER))
step = scheduler.scheduler.last_epoch
accelerator.print(f"step {step}, {accelerator.num_processes} ranks: loss {loss.item():.4f}")
accelerator.end_training()
