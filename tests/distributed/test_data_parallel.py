"""DDP, FSDP and ring on two processes take the steps of one process with all the data.

Two processes do three things, one after the other, and the tests look at what came back:

    first     2 ranks    everything, and the first halves of some runs
    second    1 rank     their second halves, and the first half of another one
    third     2 ranks    its second half
"""

import os
import signal
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from labsupport.distributed import demos
from labsupport.distributed.data_parallel import (
    cleanup_ddp,
    setup_ddp,
    share_of,
    train_with_ddp,
    train_with_fsdp,
)
from labsupport.distributed.data_parallel.costs import ddp_bytes_sent, fsdp_bytes_sent
from labsupport.distributed.process_group import RankInfo
from labsupport.distributed.sequence_parallel import train_with_ring
from labsupport.precision import FlashAttentionConfig
from labsupport.training import (
    CheckpointError,
    Decoder,
    DecoderConfig,
    MemoryOptions,
    ResumeError,
    TrainConfig,
    TrainingDivergedError,
    train,
)
from tests.distributed.workers import WorkerError

STEPS, HALF, EACH = 3, 2, 2  # micro-batches on each of two ranks
CONFIGS = {
    "tied": DecoderConfig(vocab_size=31, width=16, layers=2, heads=2),
    # 5 · 3 · 7: nothing can be divided by 2 ranks.
    "odd": DecoderConfig(
        vocab_size=31, width=18, layers=2, heads=3, mlp_width=15, norm="rms", tied=False
    ),
}
SETTINGS = TrainConfig(
    steps=STEPS, learning_rate=1e-2, warmup_steps=1, decay_steps=STEPS, max_grad_norm=0.5
)


def decoder(name="tied", seed=0, savings=None):
    torch.manual_seed(seed)
    return Decoder(CONFIGS[name], savings).double()


def stream(number, silent=()):
    """step → micro-batches, of different lengths; the silent ones have no label."""

    def micro_batch(step, i):
        generator = torch.Generator().manual_seed(100 * step + i)
        tokens = torch.randint(31, (1, 6 + 3 * i), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, : 99 if i in silent else i % 3] = -100
        return {"tokens": tokens[:, :-1], "labels": labels}

    return lambda step: [micro_batch(step, i) for i in range(number)]


STREAMS = {
    "even": stream(2 * EACH),
    "2 and 1": stream(3),
    "1 and 0": stream(1),
    "one without labels": stream(3, silent=[1]),  # rank 1's only one
}
VALIDATION = stream(3)(100)
# Without gradients that overflow in float16; a policy keeps float32 masters.
IN_16_BITS = {
    "float16": replace(SETTINGS, autocast=torch.float16),
    "policy": replace(SETTINGS, policy=FlashAttentionConfig.bfloat16()),
}
UNEVEN = {"ddp": ["2 and 1", "one without labels"], "fsdp": ["1 and 0", "one without labels"]}


# --- what runs in the processes -------------------------------------------------------------------


def trained(how, *, stream="even", model=None, settings=SETTINGS, **options):
    model, batches, info = model or decoder(), STREAMS[stream], RankInfo.current()
    validation = VALIDATION
    if how is not train_with_ring:
        batches, validation = share_of(batches, info), VALIDATION[info.rank :: info.world]
    settings = replace(settings, gradient_accumulation_steps=2 * EACH)
    options |= {"validation": validation, "progress": False}
    run = how(model, batches, settings, **options)
    weights = {
        name: (w.full_tensor() if isinstance(w, DTensor) else w).clone()
        for name, w in model.state_dict().items()
    }
    return run, weights


def first(folder):
    info = setup_ddp()
    saving = MemoryOptions(checkpoint=True, loss_chunk=4, mlp_chunk=3)
    mixed = {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    ddp, fsdp, ring = train_with_ddp, train_with_fsdp, train_with_ring
    half = {"settings": replace(SETTINGS, steps=HALF), "folder": f"{folder}/fsdp"}
    got = {
        # DDP and the ring start from rank 0's weights, whatever the others have.
        "ddp": trained(ddp, model=decoder(seed=info.rank)),
        "ddp, always in sync": trained(ddp, sync_every=True),
        "fsdp": trained(fsdp),
        "fsdp, saving": trained(fsdp, model=decoder(savings=saving), cpu_offload=True),
        "ring": trained(ring, model=decoder(seed=info.rank)),
        "fsdp, half": trained(fsdp, **half),
        "fsdp, bfloat16": trained(fsdp, model=decoder().float(), **mixed),
        "refused": refusals(info),
    }
    for how in (ddp, fsdp, ring):
        for name, settings in IN_16_BITS.items():
            if (how, name) != (fsdp, "policy"):
                run, _ = trained(how, model=decoder().float(), settings=settings)
                got[f"{how.__name__}, {name}"] = run
    for name, how in (("ddp", ddp), ("fsdp", fsdp)):
        got[f"{name}, odd"] = trained(how, model=decoder("odd"))
        for uneven in UNEVEN[name]:
            got[f"{name}, {uneven}"] = trained(how, stream=uneven)
    return got


def refusals(info):
    """Messages of errors that all ranks raise alike, by what they must say."""
    diverged, said = decoder(), {}
    with torch.no_grad():
        diverged.head.weight[3, 3] = float("nan")
    ddp, fsdp, ring = train_with_ddp, train_with_fsdp, train_with_ring
    policy = {"policy": FlashAttentionConfig.bfloat16()}
    many = "gave a rank 2 micro-batches, but the settings say gradient_accumulation_steps=1"
    for message, how, model, batches, changes in (
        ("the loss is nan. The step was not taken", ddp, diverged, stream(1), {}),
        (many, ddp, decoder(), share_of(stream(3), info), {}),
        ("no label to learn from", fsdp, decoder(), stream(1, silent=[0]), {}),
        ("FSDP's mixed_precision", fsdp, decoder(), stream(1), policy),
        ("ranks' weights differ", fsdp, decoder(seed=info.rank), stream(1), {}),
        ("no nn.ModuleList", fsdp, torch.nn.Linear(3, 3), stream(1), {}),
        ("rank 1 was given other micro-batches", ring, decoder(), stream(1 + info.rank), {}),
    ):
        try:
            how(model, batches, replace(SETTINGS, **changes), progress=False)
        except (TrainingDivergedError, ValueError) as caught:
            said[message] = str(caught)
    return said


def second(folder):
    setup_ddp()
    Path(folder, "fsdp", "partial-000009").mkdir()  # as a killed run leaves it
    got = [trained(train_with_fsdp, folder=f"{folder}/fsdp") for _ in range(2)]
    half = replace(SETTINGS, steps=HALF)
    trained(train_with_ddp, settings=half, folder=f"{folder}/one")
    with pytest.raises(ResumeError, match=r"learning_rate was 0\.01 and is 1\.0"):
        trained(train_with_ddp, settings=replace(half, learning_rate=1.0), folder=f"{folder}/one")
    newest = Path(folder, "fsdp", f"step-{STEPS:06d}", "__0_0.distcp")
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-000003 cannot be read"):
        trained(train_with_fsdp, folder=f"{folder}/fsdp")
    return got


def third(folder):
    """Two ranks go on under FSDP with what one rank saved under DDP."""
    setup_ddp()
    return trained(train_with_fsdp, folder=f"{folder}/one")


# --- what comes back, and what one process says ---------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def two(pool, folder):
    return pool(2, joined=False).run(first, folder)


@cache
def alone(stream="even", name="tied", dtype=torch.float64):
    """The steps of the loop on one device, with the micro-batches of all ranks."""
    model = decoder(name).to(dtype)
    settings = replace(SETTINGS, gradient_accumulation_steps=len(STREAMS[stream](0)))
    options = {"validation": VALIDATION, "progress": False}
    return train(model, STREAMS[stream], settings, **options), model.state_dict()


def assert_same_run(got, expected, bound=1e-13):
    (run, got_weights), (history, weights) = got, expected
    last, other = (rows.rows[-1].validation_loss for rows in (run.history, history))
    assert last == pytest.approx(other, rel=bound)
    for column in ("loss", "grad_norm"):
        one, other = ([getattr(row, column) for row in rows] for rows in (run.history, history))
        assert one == pytest.approx(other, rel=bound)
    assert got_weights.keys() == weights.keys()
    for name, weight in weights.items():
        # AdamW divides by gradients' sizes: where one is nothing but rounding (a key's bias),
        # rounding decides.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(got_weights[name], weight, rtol=0, atol=10 * bound)


def test_two_ranks_take_the_steps_of_one_process_with_all_their_data(two):
    for rank in two:
        for how in ("ddp", "ddp, always in sync", "fsdp", "fsdp, saving", "ring"):
            assert_same_run(rank[how], alone(), bound=1e-11 if how == "ring" else 1e-13)
            assert [r.tokens for r in rank[how][0].history] == [r.tokens for r in alone()[0]]
        # Neither tensors nor micro-batches need divide evenly.
        for how, uneven in UNEVEN.items():
            assert_same_run(rank[f"{how}, odd"], alone(name="odd"))
            for each in uneven:
                assert_same_run(rank[f"{how}, {each}"], alone(each))


def test_bfloat16_is_near_float32_and_not_float32(two):
    history, _ = alone(dtype=torch.float32)
    for run, weights in (rank["fsdp, bfloat16"] for rank in two):
        assert run.history.losses == pytest.approx(history.losses, rel=5e-3)
        assert run.history.losses != pytest.approx(history.losses, rel=1e-6)
        assert all(w.dtype == torch.float32 for w in weights.values())


@pytest.mark.parametrize("name", IN_16_BITS)
def test_16_bits_are_those_of_one_process_on_two_ranks_too(two, name):
    """Loss scaling, and float32 masters; gradients are added up in float32."""
    settings = replace(IN_16_BITS[name], gradient_accumulation_steps=2 * EACH)
    model = decoder().float()
    history = train(model, STREAMS["even"], settings, validation=VALIDATION, progress=False)
    for rank in two:
        runs = [run for case, run in rank.items() if case.endswith(f", {name}")]
        assert len(runs) == (3 if name == "float16" else 2)
        for run in runs:
            assert run.history.losses == pytest.approx(history.losses, rel=2e-3)
            norms = [[row.grad_norm for row in rows] for rows in (run.history, history)]
            assert norms[0] == pytest.approx(norms[1], rel=2e-2)
            assert not any(row.skipped for row in run.history)


def parameter_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def test_gradients_are_reduced_once_a_step_and_without_no_sync_once_a_micro_batch(two):
    nbytes = parameter_bytes(decoder())
    for rank in two:
        once, always = rank["ddp"][0], rank["ddp, always in sync"][0]
        assert once.all_reduces == [(1, nbytes)] * STEPS
        assert always.all_reduces == [(EACH, EACH * nbytes)] * STEPS


def test_what_is_sent_by_the_formulas_of_the_zero_paper():
    assert fsdp_bytes_sent(1000, 1000, 4, kept_bytes=1000) == ddp_bytes_sent(1000, 4)
    assert fsdp_bytes_sent(1000, 1000, 4, micro_batches=3) == 0.75 * 7000
    assert fsdp_bytes_sent(1000, 1000, 4, micro_batches=3, sync_every=True) == 0.75 * 9000
    assert ddp_bytes_sent(1000, 1) == fsdp_bytes_sent(1000, 1000, 1) == 0


def test_fsdp_holds_half_of_everything_on_each_of_two_ranks_and_ddp_all(two):
    for name, half in (("ddp", 1), ("ddp, odd", 1), ("fsdp", 0.5), ("fsdp, odd", 0.5)):
        model = decoder("odd" if "odd" in name else "tied")
        whole, tensors = parameter_bytes(model), len(list(model.parameters()))
        held = [rank[name][0].memory for rank in two]
        assert sum(m.parameters for m in held) == pytest.approx(2 * half * whole)
        assert sum(m.gradients for m in held) == pytest.approx(2 * half * whole)
        # Two states a parameter, and a step counter of 4 bytes for each tensor.
        assert sum(m.optimizer for m in held) == pytest.approx(2 * (2 * half * whole + 4 * tensors))
        assert all(m.parameters == pytest.approx(half * whole, rel=0.12) for m in held)


def test_a_run_goes_on_with_another_number_of_ranks_from_whole_checkpoints_only(pool, folder, two):
    assert len(two[0]["fsdp, half"][0].history) == HALF
    ranks = pool(2, joined=False)
    ((one, again),) = ranks.run(second, folder, ranks=1)
    assert_same_run(one, alone())
    assert_same_run(again, alone())  # complete: not run again
    assert again[0].memory.gradients == 0
    names = sorted(path.name for path in Path(folder, "fsdp").iterdir())
    assert [name for name in names if name != ".lock"] == ["step-000002", "step-000003"]
    for rank in ranks.run(third, folder):
        assert_same_run(rank, alone())


def goes_on(folder, how, steps):
    setup_ddp()
    model, settings = decoder().float(), replace(SETTINGS, steps=steps)
    return trained(HOW[how], model=model, settings=settings, folder=folder)[0].history.losses


@pytest.mark.parametrize("how", ["ddp", "fsdp", "ring"])
def test_one_process_two_ranks_and_one_again_take_one_runs_steps(pool, how, tmp_path):
    settings = replace(SETTINGS, gradient_accumulation_steps=2 * EACH)
    options = {"folder": tmp_path, "progress": False}
    train(decoder().float(), STREAMS["even"], replace(settings, steps=1), **options)
    for losses in pool(2, joined=False).run(goes_on, tmp_path, how, 2):
        assert len(losses) == 2
    resumed = train(decoder(seed=1).float(), STREAMS["even"], settings, **options)
    history, _ = alone(dtype=torch.float32)
    assert resumed.losses == pytest.approx(history.losses, rel=1e-6)


HOW = {"ddp": train_with_ddp, "fsdp": train_with_fsdp, "ring": train_with_ring}


def train_on_rank(how, folder, dies=None):
    """Rank 1 may be killed in the third step, or in writing its checkpoint."""
    place, own, steps = setup_ddp(), decoder(savings=MemoryOptions(checkpoint=True)), []

    def die(*_):
        if place.rank == 1 and len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_file(event, args):
        if event == "open" and "partial-000003" in str(args[0]):
            del steps[2:]
            die()

    if dies == "in the backward":  # after the second block's ring, and before the first one's
        own.blocks[1].attention_norm.register_full_backward_hook(die)
    elif dies == "in a checkpoint":
        sys.addaudithook(on_file)
    settings = replace(SETTINGS, checkpoint_every=2)
    on_step = lambda row: steps.append(row.step)  # noqa: E731
    got = trained(HOW[how], model=own, settings=settings, folder=folder, on_step=on_step)
    return steps, got


@pytest.mark.parametrize(
    ("how", "dies"),
    [("ring", "in the backward"), ("ddp", "in the backward"), ("fsdp", "in a checkpoint")],
)
def test_a_killed_rank_ends_the_run_which_goes_on_from_the_checkpoint(pool, how, dies, tmp_path):
    with pytest.raises(WorkerError, match="rank 1: has died") as caught:
        pool(2, joined=False).run(train_on_rank, how, tmp_path, dies)
    assert "rank 0: Traceback" in str(caught.value)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]
    assert bool(list(tmp_path.glob("partial-*"))) == (dies == "in a checkpoint")
    ((steps, got),) = pool(2, joined=False).run(train_on_rank, how, tmp_path, ranks=1)
    assert steps == [2]
    assert_same_run(got, alone(), bound=1e-11)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["step-000002", "step-000003"]


def stopped_by_rank_1(folder):
    """The work a run has done when rank 1 alone is asked to stop, in its second step."""
    place, calls = setup_ddp(), []
    stop = lambda: bool(calls.append(1)) or (place.rank == 1 and len(calls) == 2)  # noqa: E731
    return len(trained(train_with_ddp, folder=folder, stop=stop)[0].history)


def test_all_ranks_stop_with_a_checkpoint_when_one_is_asked_to(pool, tmp_path):
    ranks = pool(2, joined=False)
    assert ranks.run(stopped_by_rank_1, tmp_path) == [2, 2]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]
    for steps, got in ranks.run(train_on_rank, "ddp", tmp_path):
        assert steps == [2]
        assert_same_run(got, alone(), bound=1e-11)


def test_what_cannot_go_well_is_refused_on_all_ranks(two):
    for said in (rank["refused"] for rank in two):
        assert len(said) == 7
        assert all(message in text for message, text in said.items())


def test_a_process_started_by_hand_is_a_group_of_one():
    info = setup_ddp()
    try:
        assert (info.rank, info.world) == (0, 1)
        with pytest.raises(RuntimeError, match="exists already"):
            setup_ddp()
    finally:
        cleanup_ddp()
    cleanup_ddp()  # nothing to do
    with pytest.raises(RuntimeError, match="setup_ddp"):
        RankInfo.current()
    with pytest.raises(ValueError, match="backend is 'mpi'"):
        setup_ddp("mpi")


# --- what notebook 3 does not judge of the functions that it launches -----------------------------


def test_two_ranks_need_half_of_what_one_needs(pool):
    alone = demos.step_memory([512])[0]
    assert (alone["ranks"], alone["sent_bytes"]) == (1, 0)
    for (row,) in pool(2, joined=False).run(demos.step_memory, [512]):
        assert (row["ranks"], row["seqlen"]) == (2, 512)
        assert row["sent_bytes"] > 0
        assert alone["peak_memory_bytes"] / row["peak_memory_bytes"] == pytest.approx(2, abs=0.2)


def test_spans_that_overlap_or_nearly_touch_are_joined():
    spans = [(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0005, 2.5)]
    assert demos.joined(spans) == [(0.0, 2.5), (3.0, 4.0)]
