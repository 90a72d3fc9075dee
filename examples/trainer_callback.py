"""A transformers Trainer as a cluster of an isles run: `python examples/trainer_callback.py alice.invite`, on every machine with its own invite.

The run's spec gives `model.module` and no model. Needs accelerate, as every Trainer does.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import isles

VOCABULARY, LENGTH = 64, 16


class Text(Dataset[dict[str, torch.Tensor]]):
    """Made-up text, in which the next token follows from the last two."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * len(self) + index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        for i in range(2, LENGTH):
            tokens[i] = (3 * tokens[i - 1] + tokens[i - 2]) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", help="the invite's file, or the folder of a cluster that joined before")
    parser.add_argument("--out", help="the cluster's folder")
    parser.add_argument("--steps", type=int, default=1000, help="as many as the run has")
    parser.add_argument("--seed", type=int, default=0, help="of the data: another one on every cluster")
    options = parser.parse_args()
    torch.manual_seed(0)  # the same model everywhere
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="trainer", max_steps=options.steps, per_device_train_batch_size=8, learning_rate=5e-3, logging_steps=1,
        save_strategy="no", report_to=[], include_num_input_tokens_seen=True, disable_tqdm=True,
    )  # fmt: skip
    callback = isles.IslesCallback(options.where, out=options.out)
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Text(options.seed), callbacks=[callback])
    trainer.train()


if __name__ == "__main__":
    main()
