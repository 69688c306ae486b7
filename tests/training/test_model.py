"""A decoder has the shape it says, sees what it may see, and refuses what it cannot compute."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labsupport.training.model import PRESETS, Decoder, DecoderConfig, Savings
from tests.models.tiny import VOCABULARY, tokens
from tests.training.decoders import ROTARY, SMALL, model, of_each_shape, shifted


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # GPT-2's 124,439,808 without its 1,024 x 768 learned positions; 354,823,168 and 1,024².
        ("gpt2-small", 124_439_808 - 1024 * 768),
        ("gpt2-medium", 354_823_168 - 1024 * 1024),
        ("llama-110m", 109_529_856),
        ("tiny", 826_240),
    ],
)
def test_presets_have_exactly_as_many_parameters_as_they_say(name, parameters):
    with torch.device("meta"):
        decoder = Decoder(PRESETS[name])
    assert sum(p.numel() for p in decoder.parameters()) == parameters
    assert DecoderConfig.preset(name).parameters == parameters


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_parameters_are_counted_exactly_in_every_shape(positions, norm, mlp):
    for bias, tied, kv_heads in itertools.product([True, False], [True, False], [None, 1, 2]):
        config = DecoderConfig(
            vocab_size=61,
            width=24,
            layers=3,
            heads=4,
            kv_heads=kv_heads,
            mlp_width=50,
            positions=positions,
            max_positions=17,
            norm=norm,
            mlp=mlp,
            bias=bias,
            tied=tied,
        )
        with torch.device("meta"):
            assert config.parameters == sum(p.numel() for p in Decoder(config).parameters())


def test_a_preset_takes_changes():
    assert DecoderConfig.preset("gpt2-small", positions="learned").parameters == 124_439_808
    with pytest.raises(ValueError, match="no preset 'gpt3'; there are gpt2-small"):
        DecoderConfig.preset("gpt3")


def test_weights_are_drawn_as_gpt2s():
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(vocab_size=500, width=256, layers=8, heads=4))
    block = decoder.blocks[3]
    for weight, std in (
        (decoder.embedding.weight, 0.02),
        (block.attention.query.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / 4),
        (block.mlp.down.weight, 0.02 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        assert abs(weight.mean().item()) < std / 50
    assert not block.mlp.up.bias.any()
    assert block.mlp_norm.weight.eq(1).all()
    torch.manual_seed(0)
    again = Decoder(decoder.config).state_dict()
    assert all(torch.equal(again[name], t) for name, t in decoder.state_dict().items())


# --- tokens, labels, positions, documents ---------------------------------------------------------


@of_each_shape
def test_the_loss_takes_labels_that_are_already_shifted(shape):
    ids, labels = shifted(2, 30)
    labels = labels.clone()
    labels[0, :7] = -100
    decoder = model(shape)
    logits = decoder(ids)
    assert logits.shape == (2, 30, VOCABULARY)
    counted = labels != -100
    expected = F.cross_entropy(logits[counted], labels[counted])
    for chunk in (None, 8):
        decoder.savings = Savings(loss_chunk=chunk)
        torch.testing.assert_close(decoder(ids, labels), expected, rtol=1e-6, atol=0)


@of_each_shape
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_float64_decoder_computes_in_float64_to_the_end(shape, chunk):
    ids, labels = shifted(2, 30)
    expected = model(shape)(ids, labels).item()
    exact = copy.deepcopy(model(shape, Savings(loss_chunk=chunk))).double()
    loss = exact(ids, labels)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() != loss.float().item()


@of_each_shape
def test_no_token_sees_what_follows(shape):
    ids = tokens(1, 20)
    other = ids.clone()
    other[0, 12:] = tokens(1, 8, seed=1)
    decoder = model(shape)
    torch.testing.assert_close(decoder(other)[:, :12], decoder(ids)[:, :12], rtol=0, atol=1e-5)
    assert (decoder(other)[:, 12:] - decoder(ids)[:, 12:]).abs().max() > 0.1


@of_each_shape
@pytest.mark.parametrize("savings", [Savings(), Savings(checkpoint=True, mlp_chunk=5)], ids=str)
def test_packed_documents_have_the_hidden_states_of_each_alone(shape, savings):
    lengths = [7, 1, 12, 4]
    ids = tokens(1, sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    decoder = model(shape, savings)
    packed = decoder.hidden(ids, cu_seqlens=cu_seqlens)
    alone = [decoder.hidden(document) for document in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=2e-5)
    # Without the offsets the documents see one another.
    assert (decoder.hidden(ids) - packed).abs().max() > 0.1


@of_each_shape
def test_positions_are_what_the_model_goes_by(shape):
    ids, decoder = tokens(2, 12), model(shape)
    expected = decoder.hidden(ids)
    for positions in (torch.arange(12), torch.arange(12).repeat(2, 1)):
        assert torch.equal(decoder.hidden(ids, positions=positions), expected)
    spread = decoder.hidden(ids, positions=torch.arange(12) * 3)
    assert (spread - expected).abs().max() > 0.1
    later = decoder.hidden(ids, positions=torch.arange(40, 52))
    if shape in ROTARY:  # only differences of positions count
        torch.testing.assert_close(later, expected, rtol=0, atol=2e-5)
    else:
        assert (later - expected).abs().max() > 0.1


# --- what is refused ------------------------------------------------------------------------------

IDS = tokens(2, 12)


@pytest.mark.parametrize(
    ("ids", "options", "error", "said"),
    [
        (IDS.float(), {}, TypeError, "int64.*float32"),
        (IDS[0], {}, ValueError, r"\(batch, seqlen\).*\(12,\).*unsqueeze"),
        (IDS + VOCABULARY, {}, ValueError, "tokenizer"),
        (IDS, {"cu_seqlens": torch.tensor([0, 12])}, ValueError, r"hold several.*reshape\(1, -1\)"),
        (IDS[:1], {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "ends at seqlen 12"),
        (IDS[:1], {"cu_seqlens": torch.tensor([0.0, 12.0])}, ValueError, "1-D integer"),
        (IDS, {"positions": torch.arange(11)}, ValueError, r"\(11,\) must be \(12,\) or \(2, 12\)"),
        (IDS, {"positions": torch.arange(12.0)}, TypeError, "must be integers.*float32"),
        (IDS, {"labels": IDS[:, 1:]}, ValueError, r"labels\[:, i\] is the token after"),
        (IDS, {"labels": IDS + VOCABULARY}, ValueError, "out of range"),
    ],
)
@of_each_shape
def test_inputs_that_do_not_fit_are_refused(shape, ids, options, error, said):
    with pytest.raises(error, match=said):
        model(shape)(ids, **options)


@pytest.mark.parametrize(
    "options", [{}, {"positions": torch.arange(53, 65)}, {"cu_seqlens": torch.tensor([0, 65])}]
)
def test_positions_that_were_not_learned_are_refused(options):
    ids = tokens(1, 12 if "positions" in options else 65)
    with pytest.raises(ValueError, match=r"position 64 was asked for.*0 ... 63.*rotary"):
        model("gpt2")(ids, **options)
    model("gpt2")(tokens(1, 64))
    model("gpt2 with rotary positions")(ids, **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": "sinusoidal"}, "must be one of .'rotary', 'learned'"),
        ({"width": 30}, "no multiple of 4 heads"),
        ({"width": 20}, "head_dim 5.*even"),
        ({"kv_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"mlp": "swiglu"}, "needs its mlp_width.*about 85"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **changes)


def test_offsets_of_documents_may_lie_on_another_device_than_the_tokens():
    with torch.device("meta"):  # stands for a GPU: nothing on it can be mixed with a CPU's tensors
        decoder = Decoder(SMALL, Savings(attention="standard"))
        packed = torch.zeros(1, 8, dtype=torch.int64)
    hidden = decoder.hidden(packed, cu_seqlens=torch.tensor([0, 3, 8]))
    assert hidden.shape == (1, 8, SMALL.width)
