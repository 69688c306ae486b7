"""A model that fills gaps in source code: some bytes are masked, and it says which they were.

It looks in both directions, as BERT does, so there is no causal mask. `python train.py` trains it
on the lab's own source. The change of the capstone is the function `flash`; everything else is as
it was before.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from labsupport import paths
from labsupport.attention import attention as front_door

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LENGTHS = (256, 512, 1024, 2048)  # tokens of a sequence: what is measured
BATCH = 2
WIDTH, HEADS, LAYERS = 128, 4, 3
GAP = 0  # a byte that no source file holds stands for what is masked
MASKED = 0.15


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in both directions; all are (batch, heads, seqlen, head_dim)."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.softmax(dim=-1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function; `attention` takes (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return front_door(q, k, v).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"naive": naive, "flash": flash}


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it and a shortcut around it."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One block: (batch, seqlen, WIDTH) in and out."""
        # (batch, seqlen, 3 * WIDTH) as three times (batch, heads, seqlen, head_dim)
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes with gaps in, scores for the byte at each place out."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seqlen) bytes to (batch, seqlen, 256) logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.bytes(tokens) + self.places(places)))


def make_model(attention: Attention) -> Model:
    """The same weights for every attention, so that only attention differs."""
    torch.manual_seed(0)
    return Model(attention)


@functools.cache
def text() -> Tensor:
    """The package's source files, one after the other, as bytes."""
    files = sorted(Path(paths.__file__).parent.rglob("*.py"))
    whole = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(whole, dtype=torch.uint8).long()


def make_batch(seqlen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Passages with gaps, and the bytes that stood there (-100 elsewhere: it does not count)."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text()) - seqlen, (BATCH,), generator=draw).tolist()
    passages = torch.stack([text()[start : start + seqlen] for start in starts])
    gaps = torch.rand(passages.shape, generator=draw) < MASKED
    return passages.masked_fill(gaps, GAP), passages.masked_fill(~gaps, -100)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean negative log-likelihood of a masked byte, in nats."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def train(name: str, seqlen: int, steps: int) -> list[float]:
    """Train with one of ATTENTIONS; returns the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(ATTENTIONS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        inputs, labels = make_batch(seqlen, seed=step)
        loss = loss_of(model, (inputs.to(device), labels.to(device)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, and print how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="flash")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a passage")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    began = time.perf_counter()
    losses = train(given.attention, given.length, given.steps)
    for step in range(0, len(losses), max(1, len(losses) // 6)):
        print(f"step {step:4}: {losses[step]:.3f} nats a gap")
    print(f"step {len(losses) - 1:4}: {losses[-1]:.3f} nats a gap")
    print(f"{given.attention}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
