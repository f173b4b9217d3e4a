"""Train a character-level GPT from scratch, with gradient accumulation, a warm-up and clipping."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 20


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block_size: int, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(step: int, max_lr: float, warmup: int, max_steps: int) -> float:
    if step < warmup:
        return max_lr * (step + 1) / warmup
    return 0.1 * max_lr + 0.45 * max_lr * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(1337)
    characters = sorted(set(TEXT))
    data = torch.tensor([characters.index(character) for character in TEXT])

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - args.block_size, (args.batch_size,))
        x = torch.stack([data[start : start + args.block_size] for start in starts])
        y = torch.stack([data[start + 1 : start + 1 + args.block_size] for start in starts])
        return x, y

    model = GPT(len(characters), args.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    x, y = get_batch()
    for step in range(args.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, args.lr, 2, args.max_steps)
        for _ in range(args.gradient_accumulation_steps):
            _, loss = model(x, y)
            x, y = get_batch()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
