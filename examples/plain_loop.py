"""A plain PyTorch training loop as a cluster of an isles run: `python examples/plain_loop.py alice.invite`, on every machine with its own invite.

The run's spec gives `model.module` and no model. Also under torchrun: `torchrun --nproc-per-node 2 examples/plain_loop.py alice.invite`; each
process then trains its own sequences, and DDP averages their gradients.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import isles

VOCABULARY, LENGTH, BATCH = 64, 16, 8


class Model(nn.Module):
    """Predicts the next token from the last four."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64, [batch, length]; returns logits, fp32, [batch, length, vocabulary]."""
        x = F.pad(self.embed(tokens), (0, 0, 3, 0))
        x = torch.cat([x[:, i : i + tokens.shape[1]] for i in range(4)], dim=-1)
        return self.head(torch.tanh(self.mix(x)))


def batch(generator: torch.Generator) -> torch.Tensor:
    """Made-up text, in which the next token follows from the last two: int64, [BATCH, LENGTH + 1]."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    for i in range(2, LENGTH + 1):
        tokens[:, i] = (3 * tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", help="the invite's file, or the folder of a cluster that joined before")
    parser.add_argument("--out", help="the cluster's folder")
    parser.add_argument("--steps", type=int, default=1000, help="of the learning rate's schedule: as many as the run has")
    parser.add_argument("--seed", type=int, default=0, help="of the data: another one on every cluster")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in every step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--save", help="file for the run's parameters")
    options = parser.parse_args()
    torch.manual_seed(0)  # the same model everywhere
    model: nn.Module = Model(options.width)
    rank = 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model, rank = nn.parallel.DistributedDataParallel(model), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (options.steps + 1))
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)
    with isles.Cluster(model, options.where, optimizer=optimizer, lr_scheduler=scheduler, out=options.out) as cluster:
        print(f"begins at step {cluster.steps_done} with lr {optimizer.param_groups[0]['lr']:.6f}", flush=True)
        while cluster.running:
            tokens = batch(generator)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            cluster.step(loss=loss.item(), tokens=BATCH * LENGTH)
            time.sleep(options.pause)
    if options.save and rank == 0:
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        save_file(bare.state_dict(), options.save)
    print(f"ends at step {cluster.steps_done}: {cluster.reason or 'the last'}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
