"""A sequence that is sharded over ranks gives the loss and the gradients of one device."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labsupport.distributed.sequence_parallel import shard_batch, shard_length, shard_model
from labsupport.training import MemoryOptions
from labsupport.training.data import pack
from tests.models.tiny import VOCABULARY, tiny
from tests.training.decoders import SHAPES, decoder_of

LENGTH = 29  # no multiple of anything
ZIGZAG = pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "contiguous"])
SAVING = MemoryOptions(checkpoint=True, loss_chunk=4, mlp_chunk=3)


# --- models and batches ---------------------------------------------------------------------------


def decoder(shape, savings=None, dtype=torch.float64):
    model = deepcopy(decoder_of(SHAPES.get(shape, shape))).to(dtype)
    model.savings = savings or MemoryOptions()
    return model


def batch_of(length=LENGTH, seed=0, rows=2, ignored=5):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    labels = row[:, 1:].clone()
    labels[:, :ignored] = -100
    return {"tokens": row[:, :-1], "labels": labels}


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- what runs on a rank, and on one device -------------------------------------------------------


def sharded_step(rank, group, args, batch, *, autocast=False, **options):
    """The whole loss, and the gradients summed over the ranks."""
    model = decoder(*args)
    with shard_model(model, group=group, **options) as sharded:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            part = sharded(sharded.shard(batch))
        part.backward()
        sharded.sum_gradients()
        loss = part.detach().clone()
        dist.all_reduce(loss, group=group)
    return loss, gradients(model)


def single_step(args, batch):
    model = decoder(*args)
    loss = model(**batch)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_ranks_agree_with_one_device(workers, ranks, args, batch, **options):
    loss, wanted = single_step(args, batch)
    largest = max(gradient.norm() for gradient in wanted.values())
    for got_loss, got in workers.run(sharded_step, args, batch, ranks=ranks, **options):
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            # Of a key's bias nothing is left but rounding: softmax does not see a constant.
            allowed = 1e-12 * max(gradient.norm(), 1e-2 * largest)
            assert (got[name] - gradient).norm() <= allowed, name


# --- loss and gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "args", "zigzag"),
    [
        (3, ("gpt2",), True),
        (2, ("gpt2 with rotary positions",), False),
        (1, ("llama, interleaved",), True),
        (2, ("gpt2", SAVING), False),
        (2, ("llama", SAVING), True),
        (4, (replace(SHAPES["llama"], heads=2, kv_heads=1),), True),  # fewer heads than ranks
    ],
)
def test_loss_and_gradients_are_those_of_one_device(workers, ranks, args, zigzag):
    assert_ranks_agree_with_one_device(workers, ranks, args, batch_of(), zigzag=zigzag)


def test_a_rank_may_have_no_label_at_all(workers):
    batch = batch_of(16, rows=1, ignored=0)
    batch["labels"][:, torch.arange(16) != 7] = -100
    assert_ranks_agree_with_one_device(workers, 4, ("gpt2",), batch, zigzag=False)


def test_under_autocast_it_is_near_float32_and_not_float32(workers):
    args = "llama", None, torch.float32
    exact, _ = single_step(args, batch_of())
    for loss, _ in workers.run(sharded_step, args, batch_of(), ranks=2, autocast=True):
        assert loss.dtype == torch.float32
        assert 1e-6 < abs(loss / exact - 1) < 2e-2


# --- shards ---------------------------------------------------------------------------------------


@ZIGZAG
@pytest.mark.parametrize("seqlen", [13, 16])
def test_each_token_keeps_its_label_and_its_position_and_fillers_are_known(seqlen, zigzag):
    tokens = torch.arange(2 * seqlen).reshape(2, seqlen)
    batch = {"tokens": tokens, "labels": tokens + 1}
    shards = [shard_batch(batch, rank, 4, zigzag=zigzag) for rank in range(4)]
    assert {s.tokens.shape for s in shards} == {(2, shard_length(seqlen, 4, zigzag=zigzag))}
    assert [s.fillers for s in shards] == [int((s.labels == -100).sum()) for s in shards]
    assert sum(s.tokens.numel() - s.fillers for s in shards) == 2 * seqlen
    whole = [torch.cat([getattr(s, name) for s in shards], 1) for name in ("tokens", "labels")]
    positions = torch.cat([s.positions for s in shards], -1).expand_as(whole[0])
    counted = whole[1] != -100
    assert sorted(whole[0][counted].tolist()) == list(range(2 * seqlen))
    assert torch.equal(whole[1][counted], whole[0][counted] + 1)
    assert torch.equal(positions[counted], whole[0][counted] % seqlen)


def packed(*lengths, size):
    documents = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in lengths]
    return next(pack(documents, size, end_token=0))


def test_one_document_with_padding_is_what_one_device_makes_of_it(workers):
    both = packed(19, size=29)
    assert both.padding == 9
    batch = {name: getattr(both, name) for name in ("tokens", "labels", "positions", "cu_seqlens")}
    assert_ranks_agree_with_one_device(workers, 2, ("llama",), batch)


def test_a_batch_that_does_not_fit_is_refused():
    for batch, said in (
        (batch_of(4) | {"labels": torch.zeros(1, 3).long()}, "must both be"),
        (batch_of(4) | {"weights": torch.zeros(1)}, "the batch also weights"),
        (batch_of(4) | {"positions": torch.arange(3)}, "one for each token of the whole sequence"),
        (packed(9, 12, size=23), r"2 documents with labels.*--join-documents"),
    ):
        with pytest.raises(ValueError, match=said):
            shard_batch(batch, 0, 2)


# --- the model ------------------------------------------------------------------------------------


def test_a_model_has_its_names_meanwhile_and_its_own_attention_afterwards(group_of_one):
    model = decoder("llama")
    before, names = model(**batch_of()), list(model.state_dict())
    with shard_model(model):
        assert list(model.state_dict()) == names
        with pytest.raises(ValueError, match="around a ring already"):
            shard_model(model)
    assert torch.equal(model(**batch_of()), before)


def test_what_a_ring_cannot_compute_is_refused(group_of_one):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was given.*from_transformers"):
        shard_model(tiny("llama"))
    with shard_model(decoder("gpt2")) as sharded, pytest.raises(ValueError, match="has learned"):
        sharded.shard(batch_of(1100))
