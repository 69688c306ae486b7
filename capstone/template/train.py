"""A small language model that reads bytes, and computes attention as the textbook does.

It is a program to start from: small, real, and in need of the change. `python train.py` trains it
on the lab's own chapters. Replace it by a program of your own, or keep it; `measure.py` asks of it
only the names in capitals, and the functions below them.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from labsupport import paths

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LENGTHS = (256, 512, 1024, 2048)  # tokens of a sequence: what is measured
BATCH = 2
WIDTH, HEADS, LAYERS = 128, 4, 2


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q, k, v and the result are (batch, heads, seqlen, head_dim)."""
    seqlen = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function, by `labsupport.attention.attention`. Mind the layout, and the mask."""
    raise NotImplementedError("flash is not written yet: it is your part of the capstone")


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
    """Bytes in, scores for the next byte out."""

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
    """The lab's chapters, one after the other, as bytes."""
    pages = sorted((paths.project_root() / "theory").glob("[0-9]*.md"))
    whole = bytearray(b"".join(page.read_bytes() for page in pages))
    return torch.frombuffer(whole, dtype=torch.uint8).long()


def make_batch(seqlen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Passages of the chapters, and the byte that follows each of theirs."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text()) - seqlen - 1, (BATCH,), generator=draw).tolist()
    passages = torch.stack([text()[start : start + seqlen + 1] for start in starts])
    return passages[:, :-1], passages[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean negative log-likelihood of a byte, in nats."""
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
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="naive")
    parser.add_argument("--length", type=int, default=512, help="bytes of a passage")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    began = time.perf_counter()
    losses = train(given.attention, given.length, given.steps)
    for step in range(0, len(losses), max(1, len(losses) // 6)):
        print(f"step {step:4}: {losses[step]:.3f} nats a byte")
    print(f"step {len(losses) - 1:4}: {losses[-1]:.3f} nats a byte")
    print(f"{given.attention}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
