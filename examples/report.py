"""Print `optimizer.report()`, and save it as a plot.

torchrun --nproc-per-node 2 examples/report.py report.png
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import zeroshard
from gpt import GPT  # type: ignore[import-not-found]

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())
model = GPT(vocabulary=256)
config = zeroshard.ZeroConfig(partition=zeroshard.FlatShards(bucket_bytes=2 << 20), overlap_param_gather=True)
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config)
for _ in range(5):
    ids = torch.randint(256, (8, 64))
    cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()  # type: ignore[no-untyped-call]
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

report = optimizer.report()  # not collective: any rank may call it
if dist.get_rank() == 0:
    print(report)
    if len(sys.argv) > 1:
        report.save_plot(sys.argv[1])
optimizer.wait_for_params()
dist.destroy_process_group()
