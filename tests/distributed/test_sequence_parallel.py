"""A sequence that is sharded over ranks gives the loss and the gradients of one device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labsupport.distributed.data_parallel import cleanup_ddp, setup_ddp, train_with_ddp
from labsupport.distributed.sequence_parallel import shard_batch, shard_model, train_with_ring
from labsupport.distributed.sequence_parallel.sharding import shard_length
from labsupport.precision.losses import compute_loss
from labsupport.training import (
    Decoder,
    DecoderConfig,
    MemoryOptions,
    TrainConfig,
    TrainingDivergedError,
    train,
)
from labsupport.training.data import pack
from tests.models.tiny import VOCABULARY, tiny
from tests.training.decoders import SHAPES

LENGTH = 29  # no multiple of anything
ZIGZAG = pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "contiguous"])
SAVING = MemoryOptions(checkpoint=True, loss_chunk=4, mlp_chunk=3)
SETTINGS = TrainConfig(
    4, 1e-2, warmup_steps=1, max_grad_norm=0.5, gradient_accumulation_steps=2, checkpoint_every=2
)


# --- models and batches ---------------------------------------------------------------------------


def decoder(config, savings=None, dtype=torch.float64, seed=0):
    """A decoder with weights that are large enough for attention to matter."""
    torch.manual_seed(seed)
    model = Decoder(config, savings).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            elif parameter is not model.norm.weight:
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=dtype))
    return model


def without_dropout(family, dtype=torch.float64):
    options = {"attn_implementation": "sdpa"}  # "eager" has its softmax in float32
    if family == "gpt2":
        options |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return tiny(family, dtype=dtype, **options).train()


def batch_of(length=LENGTH, seed=0, rows=2, ignored=5):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    labels = row[:, 1:].clone()
    labels[:, :ignored] = -100
    return {"tokens": row[:, :-1], "labels": labels}


def stream(step):
    return [batch_of(21 + 4 * i, seed=100 * step + i, ignored=3 * i) for i in range(2)]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- what runs on a rank, and on one device -------------------------------------------------------


def sharded_step(rank, group, make, args, batch, *, autocast=False, **options):
    """The whole loss, and the gradients summed over the ranks."""
    model = make(*args)
    with shard_model(model, group=group, **options) as sharded:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            part = sharded(sharded.shard(batch))
        part.backward()
        sharded.sum_gradients()
        loss = part.detach().clone()
        dist.all_reduce(loss, group=group)
    return loss, gradients(model)


def single_step(make, args, batch):
    model = make(*args)
    if isinstance(model, Decoder):
        loss = model(**batch)
    else:
        logits = model(batch["tokens"], use_cache=False).logits
        loss = compute_loss(logits, batch["labels"], dtype=logits.dtype)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_step(got, expected, bound=1e-12):
    torch.testing.assert_close(got[0], expected[0], rtol=bound, atol=0)
    assert got[1].keys() == expected[1].keys()
    largest = max(gradient.norm() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        # Of a key's bias nothing is left but rounding: softmax does not see a constant.
        allowed = bound * max(gradient.norm(), 1e-2 * largest)
        assert (got[1][name] - gradient).norm() <= allowed, name


def assert_ranks_agree_with_one_device(
    workers, make, args, batch, *, ranks, bound=1e-12, **options
):
    expected = single_step(make, args, batch)
    for got in workers.run(sharded_step, make, args, batch, ranks=ranks, **options):
        assert_same_step(got, expected, bound)


# --- loss and gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "zigzag"), [(1, True), (2, False), (3, True), (4, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_those_of_one_device(workers, shape, ranks, zigzag):
    assert_ranks_agree_with_one_device(
        workers, decoder, (SHAPES[shape],), batch_of(), ranks=ranks, zigzag=zigzag
    )


@pytest.mark.parametrize(("shape", "zigzag"), [("gpt2", False), ("llama", True)])
def test_layers_computed_again_and_chunks_change_nothing(workers, shape, zigzag):
    assert_ranks_agree_with_one_device(
        workers, decoder, (SHAPES[shape], SAVING), batch_of(), ranks=2, zigzag=zigzag
    )


def test_there_may_be_more_ranks_than_heads(workers):
    config = replace(SHAPES["llama"], heads=2, kv_heads=1)
    assert_ranks_agree_with_one_device(workers, decoder, (config,), batch_of(), ranks=4)


@pytest.mark.parametrize(("family", "loss_chunk"), [("gpt2", None), ("gpt2", 5), ("llama", None)])
def test_transformers_models_too(workers, family, loss_chunk):
    assert_ranks_agree_with_one_device(
        workers, without_dropout, (family,), batch_of(), ranks=2, loss_chunk=loss_chunk
    )


def checkpointing(family):
    model = without_dropout(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models_with_layers_computed_again(workers, family):
    assert_ranks_agree_with_one_device(
        workers, checkpointing, (family,), batch_of(), ranks=2, zigzag=False
    )


@pytest.mark.parametrize("wanted", [1, 7, 15])
def test_a_rank_may_have_no_label_at_all(workers, wanted):
    batch = batch_of(16, rows=1, ignored=0)
    label = batch["labels"][0, wanted].clone()
    batch["labels"][:] = -100
    batch["labels"][0, wanted] = label
    for zigzag in (True, False):
        assert_ranks_agree_with_one_device(
            workers, decoder, (SHAPES["gpt2"],), batch, ranks=4, zigzag=zigzag
        )


@pytest.mark.parametrize("family", ["decoder", "llama"])
def test_under_autocast_it_is_near_float32_and_not_float32(workers, family):
    made = decoder, (SHAPES["llama"], None, torch.float32)
    if family == "llama":  # whose rotary positions leave q and k in float32 beside v
        made = without_dropout, ("llama", torch.float32)
    exact = single_step(*made, batch_of())
    for loss, _ in workers.run(sharded_step, *made, batch_of(), ranks=2, autocast=True):
        assert loss.dtype == torch.float32
        assert 1e-6 < abs(loss / exact[0] - 1) < 2e-2


# --- shards ---------------------------------------------------------------------------------------


@ZIGZAG
def test_each_token_keeps_its_label_and_its_position(zigzag):
    batch = {"tokens": torch.arange(13)[None], "labels": torch.arange(1, 14)[None]}
    shards = [shard_batch(batch, rank, 3, zigzag=zigzag) for rank in range(3)]
    together = [torch.cat([getattr(s, name) for s in shards], 1)[0] for name in
                ("tokens", "labels", "positions")]  # fmt: skip
    counted = together[1] != -100
    tokens, labels, positions = (x[counted] for x in together)
    assert sorted(tokens.tolist()) == list(range(13))
    assert torch.equal(labels, tokens + 1)
    assert torch.equal(positions, tokens)
    assert len({s.tokens.shape for s in shards}) == 1
    assert together[0].numel() - 13 <= 5


@ZIGZAG
@pytest.mark.parametrize("seqlen", [12, 13, 16])
def test_what_fills_a_shard_up_is_known_and_counts_as_no_token(seqlen, zigzag):
    batch = batch_of(seqlen, rows=2, ignored=0)
    shards = [shard_batch(batch, rank, 4, zigzag=zigzag) for rank in range(4)]
    assert {s.tokens.shape[1] for s in shards} == {shard_length(seqlen, 4, zigzag=zigzag)}
    assert [s.fillers for s in shards] == [int((s.labels == -100).sum()) for s in shards]
    assert sum(s.tokens.numel() - s.fillers for s in shards) == 2 * seqlen


def packed(*lengths, size):
    documents = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in lengths]
    return next(pack(documents, size, end_token=0))


def test_one_document_with_padding_is_what_one_device_makes_of_it(workers):
    both = packed(19, size=29)
    assert both.padding == 9
    batch = {name: getattr(both, name) for name in ("tokens", "labels", "positions", "cu_seqlens")}
    expected = single_step(decoder, (SHAPES["llama"],), batch)
    for zigzag in (True, False):
        for got in workers.run(
            sharded_step, decoder, (SHAPES["llama"],), batch, ranks=2, zigzag=zigzag
        ):
            assert_same_step(got, expected)


def test_several_documents_in_a_sequence_are_refused():
    with pytest.raises(ValueError, match=r"2 documents with labels.*--join-documents"):
        shard_batch(packed(9, 12, size=23), 0, 2)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"tokens": torch.zeros(1, 4), "labels": torch.zeros(1, 3)}, "must both be"),
        (batch_of(4) | {"weights": torch.zeros(1)}, "the batch also weights"),
        (batch_of(4) | {"positions": torch.arange(3)}, "one for each token of the whole sequence"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, said):
    with pytest.raises(ValueError, match=said):
        shard_batch(batch, 0, 2)


# --- the model ------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    place = setup_ddp("gloo")
    yield place
    cleanup_ddp()


@pytest.mark.parametrize("family", ["decoder", "gpt2", "llama"])
def test_a_model_has_its_names_meanwhile_and_its_own_attention_afterwards(alone, family):
    model = decoder(SHAPES["llama"]) if family == "decoder" else without_dropout(family)
    before, names = single_step(lambda: model, (), batch_of())[0], list(model.state_dict())
    with shard_model(model):
        assert list(model.state_dict()) == names
        with pytest.raises(ValueError, match="around a ring already"):
            shard_model(model)
    assert torch.equal(single_step(lambda: model, (), batch_of())[0], before)


def test_dropout_is_refused_where_it_would_happen(alone):
    with shard_model(tiny("gpt2").train()) as sharded:
        with pytest.raises(ValueError, match=r"transformer.drop drops out with 0.1.*embd_pdrop=0"):
            sharded(sharded.shard(batch_of()))
        sharded.model.eval()
        sharded(sharded.shard(batch_of()))
    llama = tiny("llama", attention_dropout=0.2).train()
    with shard_model(llama) as sharded, pytest.raises(ValueError, match="self_attn drops out with"):
        sharded(sharded.shard(batch_of()))


def test_what_a_ring_cannot_compute_is_refused(alone):
    with pytest.raises(ValueError, match="a Linear was given"):
        shard_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="MistralForCausalLM was given"):
        shard_model(tiny("mistral"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match=r"\(dynamic\) depend on the length"):
        shard_model(tiny("llama", rope_parameters=rope))
    with pytest.raises(ValueError, match="in its savings"):
        shard_model(decoder(SHAPES["gpt2"]), loss_chunk=3)
    for model in (decoder(SHAPES["gpt2"]), without_dropout("gpt2")):
        with shard_model(model) as sharded, pytest.raises(ValueError, match="has learned"):
            sharded.shard(batch_of(1100))


# --- the loop -------------------------------------------------------------------------------------


def trained(rank, group, *, seed=0, half=False, folder=None, savings=None, batches=stream):
    model = decoder(SHAPES["llama"], savings, seed=seed * rank)
    settings = replace(SETTINGS, steps=2, decay_steps=4) if half else SETTINGS
    run = train_with_ring(model, batches, settings, folder=folder, progress=False)
    return run.history, model.state_dict()


def assert_same_run(got, bound=1e-12):
    model = decoder(SHAPES["llama"])
    history = train(model, stream, SETTINGS, progress=False)
    assert got[0].losses == pytest.approx(history.losses, rel=bound)
    assert [row.tokens for row in got[0]] == [row.tokens for row in history]
    assert [row.grad_norm for row in got[0]] == pytest.approx(
        [row.grad_norm for row in history], rel=bound
    )
    assert [row.learning_rate for row in got[0]] == [row.learning_rate for row in history]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(got[1][name], weight, rtol=0, atol=1e-10)


def test_four_ranks_take_the_steps_of_one_from_the_weights_of_rank_0(workers):
    for got in workers.run(trained, seed=1, savings=SAVING):
        assert_same_run(got)


def test_what_one_rank_saved_four_go_on_with(workers, alone, tmp_path):
    trained(0, None, half=True, folder=tmp_path)
    for got in workers.run(trained, folder=tmp_path):
        assert_same_run(got)


def test_what_four_ranks_saved_one_goes_on_with_and_ddp_too(workers, alone, tmp_path):
    workers.run(trained, half=True, folder=tmp_path / "ring")
    workers.run(trained, half=True, folder=tmp_path / "ddp")
    assert_same_run(trained(0, None, folder=tmp_path / "ring"))
    model = decoder(SHAPES["llama"])
    run = train_with_ddp(model, stream, SETTINGS, folder=tmp_path / "ddp", progress=False)
    assert_same_run((run.history, model.state_dict()))


def refusals(rank, group):
    said = {}

    def refused(name, error, model, batches):
        try:
            train_with_ring(model, batches, SETTINGS, progress=False)
        except error as caught:
            said[name] = str(caught)

    diverged = decoder(SHAPES["llama"])
    with torch.no_grad():
        diverged.head.weight[3, 3] = float("nan")
    refused("nan", TrainingDivergedError, diverged, stream)
    model = decoder(SHAPES["llama"])
    refused("own", ValueError, model, lambda step: [batch_of(24, seed=int(rank == 2))])
    silent = batch_of(24)
    silent["labels"][:] = -100
    refused("silent", ValueError, model, lambda step: [silent])
    refused("many", ValueError, model, lambda step: [batch_of(24)] * 3)
    learned = decoder(DecoderConfig(VOCABULARY, 32, 1, 2, positions="learned", max_positions=16))
    refused("long", ValueError, learned, lambda step: [batch_of(24)])
    return said


def test_what_cannot_go_well_is_refused_on_all_ranks(workers):
    for said in workers.run(refusals):
        assert "step 0: the loss is nan" in said["nan"]
        assert "step 0: rank 2 was given other micro-batches than rank 0" in said["own"]
        assert "no label to learn from" in said["silent"]
        assert "accumulation=2" in said["many"]
        assert "position 23 was asked for, but this model has learned 16" in said["long"]
