"""Train LoRA adapters of PEFT with `shard`. Run it again, on any number of ranks, to resume.

torchrun --nproc-per-node 2 examples/lora_peft.py
torchrun --nproc-per-node 3 examples/lora_peft.py --steps 80
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
from start import join_group  # type: ignore[import-not-found]
from zeroshard import checkpoint

FOLDER = Path("checkpoints-lora")
TEXT = Path(__file__).parent / "data" / "sonnets.txt"
CONTEXT = 64
BATCH = 12  # passages per step, over all ranks: the world size must divide it


def make_base(vocabulary: int) -> LlamaForCausalLM:
    """Return the base model, the same on all ranks. Its weights are random; yours come from `from_pretrained`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=CONTEXT, **sizes))


def adapters_of(step_directory: Path) -> Path:
    """Return the folder of the adapters that belong to a checkpoint."""
    return FOLDER / step_directory.name.replace("step", "adapters")


def draw_batch(ids: Tensor, step: int) -> Tensor:
    """Return this rank's part of the batch of a step."""
    starts = torch.randint(len(ids) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([ids[start : start + CONTEXT] for start in starts[dist.get_rank() :: dist.get_world_size()]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LoRA adapters, or resume.")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    options = parser.parse_args()
    device = join_group()
    text = TEXT.read_text(encoding="ascii")
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text])

    base, last = make_base(len(vocabulary)), checkpoint.latest(FOLDER)
    if last is None:
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"))
    else:
        model = PeftModel.from_pretrained(base, adapters_of(last), is_trainable=True)
    model.to(device).train()
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = zeroshard.shard(model, torch.optim.AdamW, params=trainable, lr=1e-2)
    start = 0
    if last is not None:
        start = checkpoint.load(FOLDER, optimizer=optimizer).step or 0

    for step in range(start, options.steps):
        batch = draw_batch(ids, step).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    if start < options.steps:
        if dist.get_rank() == 0:  # first, because the checkpoint that is complete counts
            model.save_pretrained(adapters_of(Path(f"step-{options.steps:09d}")))
        path = checkpoint.save(FOLDER, step=options.steps, optimizer=optimizer)
        if dist.get_rank() == 0:
            trained, total = sum(param.numel() for _, param in trainable), sum(map(torch.numel, model.parameters()))
            print(f"step {options.steps}, {dist.get_world_size()} ranks: loss {loss.item():.4f}")
            print(f"{trained:,} of {total:,} parameters are trained; adapters in {adapters_of(path)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
