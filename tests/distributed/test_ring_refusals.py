"""What a ring cannot compute is refused, on all ranks, and the error says what helps."""

import time

import pytest
import torch

from labsupport.attention import AttentionInputError, BackendUnavailableError
from labsupport.distributed.ring import (
    available_ring_kernels,
    ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from tests.distributed.rings import (
    SLOPES,
    refusal,
    shards_of,
)


def unequal(rank):
    return shards_of(5 if rank == 2 else 6)


def without_gradients_on_rank_0(rank):
    return tuple(x.detach() if rank == 0 else x for x in shards_of(4))


def of_two_dtypes(rank):
    return shards_of(4, torch.float32 if rank else torch.bfloat16)


@pytest.mark.parametrize(
    ("make_inputs", "said"),
    [
        (unequal, ["seqlen_local", "6, 6, 5", "Pad"]),
        (without_gradients_on_rank_0, ["gradients wanted", "False, True, True"]),
        (of_two_dtypes, ["dtype", "torch.bfloat16, torch.float32"]),
    ],
)
def test_ranks_that_disagree_all_raise_and_say_what_each_has(workers, make_inputs, said):
    answers = workers.run(refusal, make_inputs, {}, ranks=3)
    assert {name for name, _ in answers} == {"AttentionInputError"}
    assert all(part in text for _, text in answers for part in said)


def short_on_rank_1(rank):
    return shards_of(7 if rank else 8)


REFUSED_ON_RANK_1 = {
    "an odd zigzag shard": (short_on_rank_1, [{}, {}], "zigzag", "two chunks of one length, but 7"),
    "a window that the kernel cannot do": (
        lambda rank: shards_of(4),
        [{"kernel": "native"}, {"kernel": "native", "window_size": (1, 1)}],
        "ring",
        "cannot do windows",
    ),
}


def refusal_of_own_options(rank, group, case):
    make_inputs, options, function, _ = REFUSED_ON_RANK_1[case]
    began = time.monotonic()
    return *refusal(rank, group, make_inputs, options[rank], function), time.monotonic() - began


@pytest.mark.parametrize("case", REFUSED_ON_RANK_1)
def test_what_one_rank_refuses_is_an_error_on_all_and_not_a_hang(workers, case):
    first, second = workers.run(refusal_of_own_options, case, ranks=2)
    assert "rank 1 has refused this call of the ring" in first[1]
    assert REFUSED_ON_RANK_1[case][-1] in first[1]
    assert REFUSED_ON_RANK_1[case][-1] in second[1]
    assert max(first[2], second[2]) < 10  # gloo would wait for 30 s


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun .*init_process_group"):
        ring_flash_attn_func(*shards_of(4))


def test_inputs_that_no_ring_takes_are_refused():
    q, k, v = shards_of(6)
    for call, message in (
        (lambda: ring_flash_attn_func(q, k, v, dropout_p=0.1), r"no dropout, but dropout_p=0\.1"),
        (lambda: ring_flash_attn_func(q[:, :4], k, v), "self-attention"),
        (lambda: ring_flash_attn_func(q, k, v, layout="stripes"), "there are contiguous, zigzag"),
        (lambda: zigzag_ring_flash_attn_func(*shards_of(5)), "two chunks of one length, but 5"),
    ):
        with pytest.raises(AttentionInputError, match=message):
            call()


def test_kernels_say_what_they_cannot_do():
    q, k, v = shards_of(4)
    plain = available_ring_kernels(q, k, v)
    assert plain["flash_torch"] == plain["native"] == ()
    windowed = available_ring_kernels(q, k, v, window_size=(2, 2), alibi_slopes=SLOPES[:2])
    assert windowed["flash_torch"] == ()
    assert any("windows" in reason for reason in windowed["native"])
    assert any("alibi" in reason for reason in windowed["native"])
    assert any("log-sum-exp from outside" in reason for reason in plain["fa4"])
    ordered = available_ring_kernels(q, k, v, deterministic=True)
    assert ordered["flash_torch"] == ()
    assert any("any order" in reason for reason in ordered["cudnn"])


def test_a_kernel_that_cannot_names_those_that_can_and_an_unknown_one_the_known(workers):
    options = {"kernel": "native", "window_size": (1, 1)}
    for name, text in workers.run(refusal, _four_tokens, options, ranks=2):
        assert name == BackendUnavailableError.__name__
        assert "cannot do windows in a ring" in text
        assert "flash_torch" in text
    for name, text in workers.run(refusal, _four_tokens, {"kernel": "flash"}, ranks=2):
        assert name == "AttentionInputError"
        assert "auto, cudnn, native, flash_triton, flash_torch, fa4" in text


def _four_tokens(rank):
    return shards_of(4)
