"""Parallelism by hand: rehearsals, and the same on real processes, beside PyTorch's own."""

import contextlib
import io
import re
import runpy
import sys

import pytest
import torch

from labsupport.checks import check_ring_backward
from labsupport.checks.ex_3_6_data_parallel import (
    ShardedLinear,
    average_each,
    average_in_buckets,
    make_buckets,
)
from labsupport.checks.ex_3_7_ring_backward import ring_backward
from labsupport.distributed.by_hand import (
    ProcessComm,
    RehearsalError,
    layer_memory,
    layer_on_rank,
    rehearse,
    train_on_rank,
)

CAP = 2**15


def in_buckets(parameters, comm, is_last):
    buckets = make_buckets([p.nbytes for p in parameters], CAP)
    return average_in_buckets(parameters, buckets, comm, is_last)


def trained(rank, group):
    return [train_on_rank(attach, cap=CAP) for attach in (None, average_each, in_buckets)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_by_hand_equals_ddp_and_sends_the_predicted_buckets(pool, world):
    ranks = pool(world).run(trained)
    sizes = [p.nbytes for p in ranks[0][0]["parameters"]]
    first = ranks[0][0]["parameters"]
    for ddp, each, buckets in ranks:
        for run in (ddp, each, buckets):
            for mine, theirs in zip(run["parameters"], first, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        predicted = len(make_buckets(sizes, CAP))
        assert ddp["all_reduces"] == buckets["all_reduces"] == predicted == 2
        assert each["all_reduces"] == len(sizes)
        assert ddp["bytes"] == each["bytes"] == buckets["bytes"] == sum(sizes)


def sharded(rank, group, *arguments):
    return layer_on_rank(ShardedLinear, ProcessComm(), *arguments), layer_memory(ShardedLinear)


def test_a_sharded_layer_on_processes_computes_the_same_and_holds_half(pool):
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 5), (2, 3, 5), (2, 3, 8)
    weight, inputs, douts = (torch.randn(shape, generator=generator) for shape in shapes)
    for rank, (found, memory) in enumerate(pool(2).run(sharded, weight, inputs, douts)):
        y, dx, dshard, alive, log = found
        mean = sum(dout.mT @ x for dout, x in zip(douts, inputs, strict=True)) / 2
        torch.testing.assert_close(y, inputs[rank] @ weight.mT)
        torch.testing.assert_close(dx, douts[rank] @ weight)
        torch.testing.assert_close(dshard, mean.chunk(2)[rank])
        assert alive == (0, 0)
        assert [name for name, _ in log] == ["all_gather", "all_gather", "reduce_scatter"]
        whole, part = memory
        assert whole["held_bytes"] == 2 * part["held_bytes"] == 2 * 4 * 4 * 2**20
        assert (whole["gathered_bytes"], part["gathered_bytes"]) == (0, 4 * 2**20)


def ring_on_process(rank, group, *shards):
    return ring_backward(*(x[rank] for x in shards), ProcessComm())


def test_the_ring_backward_is_right_on_real_processes(pool, capsys):
    workers = pool(4)
    check_ring_backward(
        ring_backward, worlds=(4,), run=lambda _, *shards: workers.run(ring_on_process, *shards)
    )
    assert "[ok]" in capsys.readouterr().out


def torchrun(program, *options):
    """Return the output of a rank that torchrun starts."""
    sys.argv = [program, *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_all_strategies_of_the_capstones_program_learn_the_same(pool, project):
    losses = []
    for strategy in ("loop", "ddp", "fsdp"):
        program = str(project / "capstone" / "data_parallel.py")
        printed = pool(2, joined=False).run(
            torchrun, program, "--strategy", strategy, "--epochs", "1"
        )
        for text in printed:
            (found,) = re.findall(r"rank \d of 2: loss (.+), holds (.+) MiB", text)
            losses.append(float(found[0]))
            assert found[1] == ("2.01" if strategy == "fsdp" else "4.02")
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-5)


# --- rehearsals -----------------------------------------------------------------------------------


def test_a_rehearsal_adds_gathers_and_sends_as_processes_do():
    def program(comm):
        x = torch.full((4,), comm.rank + 1.0)
        comm.all_reduce(x)()
        own = torch.tensor([float(comm.rank)])
        gathered = comm.all_gather(own)
        part = comm.reduce_scatter(torch.arange(4.0))
        return x[0].item(), gathered.tolist(), part.tolist(), comm.send_on((own, own))()[0].item()

    assert rehearse(program, 2) == [(3, [0, 1], [0, 2], 1), (3, [0, 1], [4, 6], 0)]


def waits_alone(comm):
    if comm.rank:
        comm.all_reduce(torch.ones(1))()


def other_collectives(comm):
    (comm.all_gather if comm.rank else comm.reduce_scatter)(torch.ones(2))


def changes_what_travels(comm):
    x = torch.ones(1)
    arriving = comm.send_on((x, x))
    x += 1
    arriving()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (waits_alone, "rank 1 waits for the others' all_reduce, which never comes"),
        (other_collectives, "all ranks must make the same calls"),
        (changes_what_travels, "changed in place while it travelled"),
    ],
)
def test_a_rehearsal_names_what_would_hang_or_go_wrong(program, said):
    with pytest.raises(RehearsalError, match=said):
        rehearse(program, 2)


def test_the_cause_of_a_failed_rehearsal_is_raised_and_not_its_consequence():
    def program(comm):
        if comm.rank == 0:
            raise KeyError("cause")
        comm.all_reduce(torch.ones(1))()

    with pytest.raises(KeyError, match="cause"):
        rehearse(program, 3)
