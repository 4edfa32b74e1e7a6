"""A training script as people write it: nothing in it knows perfkit.

python train_next_item.py --batch-size 256
torchrun --nproc-per-node 8 train_next_item.py
"""

import argparse
import os

import torch
from torch import nn


class NextItem(nn.Module):
    """Reads the items that a user has seen, and scores every item of the batch as the next one."""

    def __init__(self, items: int, width: int = 128) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.reader = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The loss: the right next item should have the largest score."""
        users = self.reader(self.items(seen)).mean(dim=1)
        scores = users @ self.items(wanted).T
        return nn.functional.cross_entropy(scores, torch.arange(len(wanted), device=wanted.device))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: nn.Module = NextItem(options.items).to(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(options.steps):
        seen = torch.randint(options.items, (options.batch_size, 32), device=device)
        wanted = torch.randint(options.items, (options.batch_size,), device=device)
        optimizer.zero_grad()
        loss = model(seen, wanted)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), "next_item.pt")


if __name__ == "__main__":
    main()
