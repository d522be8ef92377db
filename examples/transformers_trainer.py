"""Train a small Llama with Transformers and a sharded optimizer. Run it again, on any number of ranks, to resume.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
torchrun --nproc-per-node 3 examples/transformers_trainer.py --steps 80
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from zeroshard.integrations.transformers import Trainer  # the only changed line

FOLDER = "checkpoints-transformers"
TEXT = Path(__file__).parent / "data" / "sonnets.txt"
CONTEXT = 64
BATCH = 12  # passages per step, over all ranks: the world size must divide it


class Passages(Dataset[dict[str, Tensor]]):
    """Passages of a text, as character ids."""

    def __init__(self) -> None:
        text = TEXT.read_text(encoding="ascii")
        self.vocabulary = sorted(set(text))
        self._ids = torch.tensor([self.vocabulary.index(character) for character in text]).unfold(0, CONTEXT, 7)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[number], "labels": self._ids[number]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama, or resume.")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    last = get_last_checkpoint(FOLDER) if os.path.isdir(FOLDER) else None
    if last is not None and int(last.rpartition("-")[2]) >= options.steps:
        print(f"already trained up to {last}: pass more --steps")  # else the Trainer trains one step more
        return
    data = Passages()
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "max_position_embeddings": CONTEXT}
    config = LlamaConfig(vocab_size=len(data.vocabulary), num_hidden_layers=4, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            FOLDER,
            per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            max_steps=options.steps,
            learning_rate=2e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            save_steps=10,
            logging_steps=10,
            save_total_limit=2,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
    )
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
