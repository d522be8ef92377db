"""Train with Ray Train and `shard`. Ray starts the workers, and restarts them after a failure. Run again to resume.

python examples/ray_train.py --workers 2
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroshard
from zeroshard import checkpoint

FOLDER = "checkpoints-ray"
EVERY = 10  # steps between checkpoints


def train(settings: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialized the process group, and calls this again after a failure."""
    device, context = ray.train.torch.get_device(), ray.train.get_context()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 1)).to(device)  # no prepare_model: no DDP
    optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=1000)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if checkpoint.latest(settings["folder"]):  # on all workers, as many as there are now
        checkpoint.load(settings["folder"], **parts)

    for step in range(scheduler.last_epoch + 1, settings["steps"] + 1):
        torch.manual_seed(1000 * step + context.get_world_rank())  # other inputs on each worker
        inputs = torch.randn(64, 32, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
        torch.autograd.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % EVERY == 0:  # all workers write their shards to a folder that all of them see
            checkpoint.save(settings["folder"], step=step, **parts)
            ray.train.report({"step": step, "loss": loss.item()})
            if context.get_world_rank() == 0:
                print(f"step {step}, {context.get_world_size()} workers: loss {loss.item():.4f}")


def make_trainer(folder: Path, workers: int, steps: int, loop: Any = train) -> Any:
    """Return a trainer that keeps everything in `folder`, which all workers must see."""
    use_gpu = torch.cuda.is_available()
    return ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder.absolute()), "steps": steps},  # workers have other directories
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        torch_config=ray.train.torch.TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            storage_path=str(folder.absolute() / "ray"), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Ray Train, or resume.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    options = parser.parse_args()
    make_trainer(Path(FOLDER), options.workers, options.steps).fit()


if __name__ == "__main__":
    main()
