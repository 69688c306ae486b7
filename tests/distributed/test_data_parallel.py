"""DDP and FSDP on two processes take the steps that one process takes with all the data.

Starting processes takes longer than what they do here. So three launches, one after the other, each
do several things, and the tests look at what came back:

    first     2 ranks    everything, and the first halves of some runs
    second    1 rank     their second halves, and the first half of another one
    third     2 ranks    its second half
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.distributed.data_parallel import (
    cleanup_ddp,
    setup_ddp,
    shard,
    share_of,
    train_with_ddp,
    train_with_fsdp,
)
from labsupport.distributed.data_parallel.costs import ddp_bytes_sent, fsdp_bytes_sent
from labsupport.distributed.launch import launch
from labsupport.distributed.process_group import RankInfo
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

STEPS, HALF, MICRO_BATCHES = 4, 2, 6
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


def decoder(name="tied", seed=0):
    torch.manual_seed(seed)
    return Decoder(CONFIGS[name]).double()


def saving():
    """A decoder that computes its blocks again in the backward pass, and its loss in chunks."""
    model = decoder()
    model.savings = MemoryOptions(checkpoint=True, loss_chunk=4, mlp_chunk=3)
    return model


def stream(number):
    """step → so many micro-batches, of different lengths and with different numbers of labels."""

    def batches(step):
        return [micro_batch(100 * step + i, length=5 + 3 * i, ignored=i % 3) for i in range(number)]

    return batches


def micro_batch(seed, length, ignored):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(31, (1, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, :ignored] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def with_a_silent_one(step):
    """Three micro-batches; the second, rank 1's only one, has no label."""
    first, _, third = stream(3)(step)
    return [first, micro_batch(step, length=4, ignored=4), third]


STREAMS = {
    "even": stream(MICRO_BATCHES),
    "2 and 1": stream(3),
    "1 and 0": stream(1),
    "one without labels": with_a_silent_one,
}


# --- what runs in the launched processes ----------------------------------------------------------


def result(run, model):
    weights = {
        name: (w.full_tensor() if isinstance(w, DTensor) else w).clone()
        for name, w in model.state_dict().items()
    }
    return {
        "losses": run.history.losses,
        "norms": [row.grad_norm for row in run.history],
        "tokens": [row.tokens for row in run.history],
        "weights": weights,
        "memory": run.memory,
        "all_reduces": run.all_reduces,
        "bytes": run.all_reduced_bytes,
    }


def trained(how, info, *, stream="even", model=None, settings=SETTINGS, **options):
    model = model or decoder()
    batches = share_of(STREAMS[stream], info)
    settings = replace(settings, gradient_accumulation_steps=MICRO_BATCHES)
    return result(how(model, batches, settings, progress=False, **options), model)


def first(folder):
    info = setup_ddp()
    torch.set_num_threads(1)
    half = replace(SETTINGS, steps=HALF)
    got = {
        # DDP starts from rank 0's weights, whatever the others have.
        "ddp": trained(train_with_ddp, info, model=decoder(seed=info.rank)),
        "ddp in small buckets": trained(train_with_ddp, info, bucket_mib=0.01),
        "ddp, always in sync": trained(train_with_ddp, info, sync_every=True),
        "fsdp": trained(train_with_fsdp, info),
        "fsdp, always in sync": trained(train_with_fsdp, info, sync_every=True),
        "fsdp, saving": trained(train_with_fsdp, info, model=saving()),
        "fsdp, offloaded": trained(train_with_fsdp, info, cpu_offload=True),
        "fsdp, bfloat16": trained(
            train_with_fsdp,
            info,
            model=decoder().float(),
            mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ),
        "ddp, bfloat16": trained(
            train_with_ddp,
            info,
            model=decoder().float(),
            settings=replace(SETTINGS, autocast=torch.bfloat16),
        ),
        "traffic": [fsdp_traffic(info, sync_every) for sync_every in (False, True)],
        "refused": refusals(info),
    }
    for name, how in (("ddp", train_with_ddp), ("fsdp", train_with_fsdp)):
        got[f"{name}, odd"] = trained(how, info, model=decoder("odd"))
        for uneven in list(STREAMS)[1:]:
            got[f"{name}, {uneven}"] = trained(how, info, stream=uneven)
        got[f"{name}, half"] = trained(how, info, settings=half, folder=f"{folder}/{name}")
    cleanup_ddp()
    return got


class Seen(TorchDispatchMode):
    """FSDP's collectives as they go by, and the bytes that this rank sends in them, in a ring."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.gathers, self.reduces, self.sent = ranks, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d._allgather_base_"):
            self.gathers += 1
            self.sent += (self.ranks - 1) * args[1].nbytes
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.reduces += 1
            self.sent += (self.ranks - 1) * args[0].nbytes
        return function(*args, **(kwargs or {}))


def fsdp_traffic(info, sync_every):
    """What one step of three micro-batches sends, and by the formula."""
    model = decoder("odd")
    whole = parameter_bytes(model)
    root = whole - parameter_bytes(model.blocks)
    shard(model)
    with Seen(info.world) as seen:
        once = replace(SETTINGS, steps=1)
        trained(train_with_fsdp, info, model=model, settings=once, sync_every=sync_every)
    formula = fsdp_bytes_sent(
        whole, whole, info.world, micro_batches=3, sync_every=sync_every, kept_bytes=root
    )
    return seen.gathers, seen.reduces, seen.sent, formula


def parameter_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def refusals(info):
    said = {}

    def refused(name, error, how, model, batches, settings=SETTINGS):
        try:
            how(model, batches, settings, progress=False)
        except error as caught:
            said[name] = str(caught)

    diverged = decoder()
    with torch.no_grad():
        diverged.head.weight[3, 3] = float("nan")
    three = share_of(stream(3), info)
    refused("nan", TrainingDivergedError, train_with_ddp, diverged, share_of(stream(1), info))
    refused("many", ValueError, train_with_ddp, decoder(), three)
    silent = lambda step: [micro_batch(0, 4, 4)]  # noqa: E731
    refused("silent", ValueError, train_with_fsdp, decoder(), silent)
    policy = replace(SETTINGS, policy=FlashAttentionConfig.bfloat16())
    refused("policy", ValueError, train_with_ddp, decoder(), three, policy)
    half = replace(SETTINGS, autocast=torch.float16)
    refused("float16", ValueError, train_with_fsdp, decoder(), three, half)
    refused("seeds", ValueError, train_with_fsdp, decoder(seed=info.rank), three)
    refused("no blocks", ValueError, train_with_fsdp, torch.nn.Linear(3, 3), three)
    return said


def second(folder):
    info = setup_ddp()
    torch.set_num_threads(1)
    Path(folder, "fsdp", "partial-000003").mkdir()  # as a killed run leaves it
    got = {
        "ddp": trained(train_with_ddp, info, folder=f"{folder}/ddp"),
        "fsdp": trained(train_with_fsdp, info, folder=f"{folder}/fsdp"),
        "again": trained(train_with_fsdp, info, folder=f"{folder}/fsdp"),
        "half": trained(
            train_with_ddp,
            info,
            settings=replace(SETTINGS, steps=HALF),
            folder=f"{folder}/one",
        ),
    }
    try:
        trained(
            train_with_ddp,
            info,
            settings=replace(SETTINGS, learning_rate=1.0),
            folder=f"{folder}/one",
        )
    except ResumeError as error:
        got["other course"] = str(error)
    newest = Path(folder, "fsdp", f"step-{STEPS:06d}", "__0_0.distcp")
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    try:
        trained(train_with_fsdp, info, folder=f"{folder}/fsdp")
    except CheckpointError as error:
        got["damaged"] = str(error)
    cleanup_ddp()
    return got


def third(folder):
    info = setup_ddp()
    torch.set_num_threads(1)
    # What one rank saved under DDP, two go on with under FSDP.
    got = {"fsdp": trained(train_with_fsdp, info, folder=f"{folder}/one")}
    cleanup_ddp()
    return got


# --- the launches, and what one process says ------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def two(folder):
    return launch(first, (folder,), timeout=60)


@pytest.fixture(scope="module")
def one(folder, two):
    return launch(second, (folder,), processes=1, timeout=60)[0]


@pytest.fixture(scope="module")
def two_again(folder, one):
    return launch(third, (folder,), timeout=60)


def alone(stream="even", name="tied", model=None, **changes):
    """The steps of the loop on one device, with the micro-batches of all ranks."""
    model = model or decoder(name)
    settings = replace(SETTINGS, gradient_accumulation_steps=len(STREAMS[stream](0)), **changes)
    history = train(model, STREAMS[stream], settings, progress=False)
    return history, model.state_dict()


def assert_same_run(got, expected, bound=1e-13):
    history, weights = expected
    assert got["losses"] == pytest.approx(history.losses, rel=bound)
    assert got["norms"] == pytest.approx([row.grad_norm for row in history], rel=bound)
    assert got["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        # AdamW divides by gradients' sizes: where one is nothing but rounding (a key's bias),
        # rounding decides.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=10 * bound)


# --- one step is one step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        *("ddp", "ddp in small buckets", "ddp, always in sync"),
        *("fsdp", "fsdp, always in sync", "fsdp, offloaded", "fsdp, saving"),
    ],
)
def test_two_ranks_take_the_steps_of_one_process_with_all_their_data(two, how):
    expected = alone()
    for rank in two:
        assert_same_run(rank[how], expected)
        assert rank[how]["tokens"] == [row.tokens for row in expected[0]]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_neither_tensors_nor_micro_batches_need_divide_evenly(two, how):
    for rank in two:
        assert_same_run(rank[f"{how}, odd"], alone(name="odd"))
        for uneven in ("2 and 1", "1 and 0", "one without labels"):
            assert_same_run(rank[f"{how}, {uneven}"], alone(uneven))


@pytest.mark.parametrize("how", ["ddp, bfloat16", "fsdp, bfloat16"])
def test_bfloat16_is_near_float32_and_not_float32(two, how):
    history, _ = alone(model=decoder().float())
    for rank in two:
        assert rank[how]["losses"] == pytest.approx(history.losses, rel=5e-3)
        assert rank[how]["losses"] != pytest.approx(history.losses, rel=1e-6)
        assert all(w.dtype == torch.float32 for w in rank[how]["weights"].values())


# --- what is sent, what is held -------------------------------------------------------------------


def test_gradients_are_reduced_once_a_step_and_without_no_sync_once_a_micro_batch(two):
    model = decoder()
    for rank in two:
        assert rank["ddp"]["all_reduces"] == [1] * STEPS
        assert rank["ddp"]["bytes"] == [parameter_bytes(model)] * STEPS
        each = MICRO_BATCHES // 2
        assert rank["ddp, always in sync"]["all_reduces"] == [each] * STEPS
        assert rank["ddp, always in sync"]["bytes"] == [each * parameter_bytes(model)] * STEPS
        small = rank["ddp in small buckets"]
        assert small["bytes"] == rank["ddp"]["bytes"]
        # The first step has one bucket, in which DDP sees in what order gradients come.
        assert small["all_reduces"] == [1, *[small["all_reduces"][1]] * (STEPS - 1)]
        assert small["all_reduces"][1] > 1


def test_fsdp_gathers_each_block_twice_a_micro_batch_and_reduces_once_a_step(two):
    for rank in two:
        for (gathers, reduces, sent, formula), times in zip(rank["traffic"], (1, 3), strict=True):
            # Two blocks forward and backward, the root once, in each of three micro-batches.
            assert gathers == 3 * (2 * 2 + 1)
            assert reduces == times * 3  # two blocks and the root
            # Rows that the ranks cannot share evenly are padded.
            assert formula <= sent <= 1.1 * formula


def test_what_is_sent_by_the_formulas_of_the_zero_paper():
    assert ddp_bytes_sent(1000, 4) == 1500
    assert fsdp_bytes_sent(1000, 1000, 4) == 1.5 * ddp_bytes_sent(1000, 4)
    assert fsdp_bytes_sent(1000, 1000, 4, kept_bytes=1000) == ddp_bytes_sent(1000, 4)
    assert fsdp_bytes_sent(1000, 1000, 4, micro_batches=3) == 0.75 * 7000
    assert fsdp_bytes_sent(1000, 1000, 4, micro_batches=3, sync_every=True) == 0.75 * 9000
    assert ddp_bytes_sent(1000, 1) == fsdp_bytes_sent(1000, 1000, 1) == 0


def test_fsdp_holds_half_of_everything_on_each_of_two_ranks_and_ddp_all(two):
    for name, half in (("ddp", 1), ("fsdp", 0.5)):
        for config in ("", ", odd"):
            model = decoder("odd" if config else "tied")
            whole, tensors = parameter_bytes(model), len(list(model.parameters()))
            held = [rank[name + config]["memory"] for rank in two]
            assert sum(m.parameters for m in held) == pytest.approx(2 * half * whole)
            assert sum(m.gradients for m in held) == pytest.approx(2 * half * whole)
            # Two states a parameter, and a step counter of 4 bytes for each tensor.
            assert sum(m.optimizer for m in held) == pytest.approx(
                2 * (2 * half * whole + 4 * tensors)
            )
            for memory in held:
                assert memory.parameters == pytest.approx(half * whole, rel=0.12)


# --- another number of ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_what_two_ranks_saved_one_goes_on_with(two, one, how):
    assert two[0][f"{how}, half"]["losses"] == pytest.approx(alone()[0].losses[:HALF], rel=1e-13)
    assert_same_run(one[how], alone())


def test_what_one_rank_saved_under_ddp_two_go_on_with_under_fsdp(two_again):
    for rank in two_again:
        assert_same_run(rank["fsdp"], alone())


def test_a_complete_run_is_not_run_again_and_another_course_or_damage_is_refused(one):
    assert one["again"]["losses"] == one["fsdp"]["losses"]
    assert one["again"]["memory"].gradients == 0
    assert_same_run(one["again"], alone())
    assert "learning_rate was 0.01 and is 1.0" in one["other course"]
    assert "step-000004 cannot be loaded" in one["damaged"]


def test_a_checkpoint_is_there_as_a_whole_or_not_at_all_and_only_the_newest_are_kept(folder, one):
    names = sorted(path.name for path in Path(folder, "fsdp").iterdir())
    assert [name for name in names if name != ".lock"] == ["step-000002", "step-000004"]


# --- what is refused, by all ranks alike ----------------------------------------------------------


REFUSED = {
    "nan": "step 0: the loss is nan",
    "many": r"gave the ranks \[2, 1\] micro-batches, and the settings say accumulation=1",
    "silent": "no label to learn from, on any rank",
    "policy": "for one device",
    "float16": "loss scaling",
    "seeds": "the ranks' weights differ",
    "no blocks": "which modules are its blocks",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_well_is_refused_on_all_ranks(two, what):
    for rank in two:
        assert re.search(REFUSED[what], rank["refused"][what]), rank["refused"]


# --- the process group ----------------------------------------------------------------------------


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
