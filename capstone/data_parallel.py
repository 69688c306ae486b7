"""Data parallelism in plain PyTorch: a program to read, to run, and to change.

    torchrun --nproc-per-node 2 capstone/data_parallel.py
    torchrun --nproc-per-node 2 capstone/data_parallel.py --strategy fsdp

torchrun starts this file once for each process, and tells each its rank. All of them build the same
model, and each trains on its own part of the data. `--strategy`:

    loop    after the backward pass, one all-reduce for each gradient; nothing overlaps
    ddp     PyTorch's DistributedDataParallel: buckets, while the backward pass still runs
    fsdp    each rank holds a part of every weight, gradient and AdamW state

To try: your own hooks and buckets of exercise 3-6 in the place of `average`; more micro-batches
without `no_sync`; another seed on each rank before the model is built; no `set_epoch`. Say what
will happen before you run it.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS, SAMPLES = 256, 4, 2048


def build() -> nn.Sequential:
    """Return the same model on every rank: one seed, then the weights."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def dataset() -> TensorDataset:
    """Return the whole dataset: numbers, and a function of them to learn."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, :8].sin().sum(-1, keepdim=True)))


def average(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def prepare(model: nn.Sequential, strategy: str) -> nn.Module:
    """Wrap the model as the strategy asks."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp":
        for block in model:  # a block is gathered while it computes, and freed
            fully_shard(block)
        return fully_shard(model)
    return model


def train(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, int]:
    """Train; return the last step's loss, averaged over all ranks, and this rank's parameters.

    The model ends with this function: DDP must be gone before its process group is.
    """
    model = prepare(build().to(device), options.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of the shards, under FSDP
    data = dataset()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler, drop_last=True)
    loss, steps, k = torch.zeros((), device=device), 0, options.micro_batches
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # without it, each epoch has the same order
        for number, batch in enumerate(loader, start=1):
            inputs, targets = (x.to(device) for x in batch)
            update = number % k == 0
            hold = contextlib.nullcontext()
            if isinstance(model, DistributedDataParallel) and not update:
                hold = model.no_sync()  # gradients only add up: nothing travels
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(update)
            with hold:
                part = F.mse_loss(model(inputs), targets)
                (part / k).backward()
            loss += part.detach() / k
            if not update:
                continue
            if options.strategy == "loop":
                average(model)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            steps, shown = steps + 1, loss / dist.get_world_size()
            loss = torch.zeros_like(loss)
            if dist.get_rank() == 0 and steps % 20 == 0:
                print(f"step {steps}: loss {shown.item():.4f}")
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return shown, sum(p.numel() for p in own)


def main() -> None:
    """Read the options, join the other processes, train, and say what this rank holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategy", choices=["loop", "ddp", "fsdp"], default="ddp")
    parser.add_argument("--batch", type=int, default=16, help="of one rank, of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="before an update")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    loss, parameters = train(options, torch.device("cuda" if gpu else "cpu"))
    held = 16 * parameters  # weight, gradient, AdamW's two averages, in float32
    ranks = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    print(f"{ranks}: loss {loss.item():.6f}, holds {held / 2**20:.2f} MiB of state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
