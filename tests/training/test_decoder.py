"""A decoder has the shape it says, sees what it may, and saves memory without another result."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from labsupport.precision import FlashAttentionConfig, apply_precision_policy
from labsupport.training import PRESETS, Decoder, DecoderConfig, MemoryOptions, from_transformers
from labsupport.training.savings import HostStore, in_chunks, shared_gradient
from tests.models.tiny import tiny, tokens
from tests.training.decoders import (
    ROTARY,
    SMALL,
    assert_same_step,
    loss_and_gradients,
    model,
    of_each_shape,
    shifted,
)


def test_presets_and_all_shapes_have_exactly_as_many_parameters_as_they_say():
    expected = {
        # GPT-2's 124,439,808 without its 1,024 x 768 learned positions; 354,823,168 and 1,024².
        "gpt2-small": 124_439_808 - 1024 * 768,
        "gpt2-medium": 354_823_168 - 1024 * 1024,
        "llama-110m": 109_529_856,
        "tiny": 826_240,
    }
    assert {name: config.parameters for name, config in PRESETS.items()} == expected
    assert DecoderConfig.preset("gpt2-small", positions="learned").parameters == 124_439_808
    with pytest.raises(ValueError, match="no preset 'gpt3'; there are gpt2-small"):
        DecoderConfig.preset("gpt3")
    shape = DecoderConfig(61, 24, 2, 4, mlp_width=50, max_positions=17)
    names = ("positions", "norm", "mlp", "bias", "tied", "kv_heads")
    values = (("rotary", "learned"), ("layer", "rms"), ("gelu", "swiglu"), *[(True, False)] * 2)
    for chosen in [*product(*values, (None, 1))][::5]:  # each pair of values
        config = replace(shape, **dict(zip(names, chosen, strict=True)))
        with torch.device("meta"):
            assert config.parameters == sum(p.numel() for p in Decoder(config).parameters())


def test_weights_are_drawn_as_gpt2s():
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(vocab_size=500, width=128, layers=8, heads=4))
    block = decoder.blocks[3]
    for weight, std in (
        (decoder.embedding.weight, 0.02),
        (block.attention.query.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / 4),
        (block.mlp.down.weight, 0.02 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        assert abs(weight.mean().item()) < std / 40
    assert not block.mlp.up.bias.any()
    assert block.mlp_norm.weight.eq(1).all()


# --- tokens, labels, positions, documents ---------------------------------------------------------


@of_each_shape
def test_the_loss_takes_labels_that_are_already_shifted_also_in_float64(shape):
    ids, labels = shifted(2, 30)
    labels = labels.clone()
    labels[0, :7] = -100
    decoder = model(shape)
    logits, counted = decoder(ids), labels != -100
    expected = F.cross_entropy(logits[counted], labels[counted])
    torch.testing.assert_close(decoder(ids, labels), expected, rtol=1e-6, atol=0)
    exact = copy.deepcopy(decoder).double()(ids, labels)
    assert exact.item() == pytest.approx(expected.item(), rel=1e-5)
    assert exact.item() != exact.float().item()


@of_each_shape
def test_tokens_see_what_is_before_them_in_their_document_by_its_position(shape):
    ids, decoder = tokens(2, 12), model(shape)
    expected = decoder.hidden(ids)
    other = ids.clone()
    other[:, 7:] = tokens(2, 5, seed=1)
    torch.testing.assert_close(decoder.hidden(other)[:, :7], expected[:, :7], rtol=0, atol=1e-5)
    assert (decoder.hidden(other)[:, 7:] - expected[:, 7:]).abs().max() > 0.1
    for positions in (torch.arange(12), torch.arange(12).repeat(2, 1)):
        assert torch.equal(decoder.hidden(ids, positions=positions), expected)
    spread = decoder.hidden(ids, positions=torch.arange(12) * 3)
    assert (spread - expected).abs().max() > 0.1
    later = (decoder.hidden(ids, positions=torch.arange(40, 52)) - expected).abs().max()
    # With rotary positions only differences of positions count.
    assert later < 2e-5 if shape in ROTARY else later > 0.1


@of_each_shape
@pytest.mark.parametrize(
    "savings", [MemoryOptions(), MemoryOptions(checkpoint=True, mlp_chunk=5)], ids=str
)
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
    with pytest.raises(ValueError, match=r"are several: tokens.reshape\(1, -1\)"):
        decoder.hidden(tokens(2, 12), cu_seqlens=torch.tensor([0, 12]))


@pytest.mark.parametrize(
    "options", [{}, {"positions": torch.arange(53, 65)}, {"cu_seqlens": torch.tensor([0, 65])}]
)
def test_positions_that_were_not_learned_are_refused(options):
    ids = tokens(1, 12 if "positions" in options else 65)
    with pytest.raises(ValueError, match=r"position 64 is not one of the 64.*rotary"):
        model("gpt2")(ids, **options)
    model("gpt2")(tokens(1, 64))
    model("gpt2 with rotary positions")(ids, **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": "sinusoidal"}, "must be one of .'rotary', 'learned'"),
        ({"width": 30}, "multiple of 4 heads"),
        ({"width": 20}, "head_dim 5.*even"),
        ({"kv_heads": 3}, "3 kv_heads"),
        ({"mlp": "swiglu"}, "needs its mlp_width.*about 85"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **changes)
    with pytest.raises(ValueError, match="mlp_chunk is 0"):
        MemoryOptions(mlp_chunk=0)


# --- savings --------------------------------------------------------------------------------------

SAVINGS = [
    MemoryOptions(checkpoint=True),
    MemoryOptions(mlp_chunk=7),
    MemoryOptions(loss_chunk=7),
    MemoryOptions(head_chunk=3),
    MemoryOptions("standard", True, 7, 7, torch.float32, head_chunk=1),
    MemoryOptions("auto", True, 7, 7, torch.float32, head_chunk=1, offload=True),
]


@of_each_shape
def test_a_saving_changes_loss_and_gradients_by_rounding_only(shape):
    ids, labels = shifted(1, 24)
    labels = labels.clone()
    labels[0, 10:14] = -100
    for documents in (None, torch.tensor([0, 9, 10, 24], dtype=torch.int32)):
        expected = loss_and_gradients(model(shape), ids, labels, cu_seqlens=documents)
        for saving in SAVINGS:
            got = loss_and_gradients(model(shape, saving), ids, labels, cu_seqlens=documents)
            assert_same_step(got, expected)


def test_what_is_saved_in_host_memory_comes_back_one_ahead():
    def layers(x):
        for _ in range(3):
            x = checkpoint(lambda x: (x.sin() * x).cos(), x, use_reentrant=False)
        return x.sum()

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(layers(x), x)
    store = HostStore(x.device)
    with store.hooks():
        loss = layers(x)
    assert len(store.parked) == 3
    store.fetch(2)
    assert list(store.coming) == [1]
    (given,) = torch.autograd.grad(loss, x)
    assert torch.equal(given, expected)
    with pytest.raises(ValueError, match="checkpoint=True, too"):
        MemoryOptions(offload=True)


def test_small_gradients_of_many_uses_survive_a_large_one():
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    use = shared_gradient(x)
    sum(use() * factor for factor in (1.0, *[2**-10] * 64)).float().sum().backward()
    assert x.grad.tolist() == [1 + 2**-4] * 3  # in bfloat16 each of the 64 would be lost


def test_chunks_add_up_a_weights_gradient_in_float32_under_autocast():
    layer, x = torch.nn.Linear(8, 8), torch.randn(4096, 8).abs()
    exact = x.double().sum(0).expand(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        in_chunks(layer, x, 8).sum().backward()
    assert (layer.weight.grad - exact).abs().max() < exact.max() / 500


class Calls(TorchDispatchMode):
    """Counts attention's two passes."""

    def __init__(self):
        super().__init__()
        self.passes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product_" in str(func):
            self.passes["backward" if "backward" in str(func) else "forward"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("documents", [1, 3])
def test_attention_runs_once_where_its_results_wait_in_host_memory(documents):
    ids, labels = shifted(1, 24)
    ends = None if documents == 1 else torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    groups = SMALL.layers * SMALL.heads * documents
    for offload, passes in ((True, 1), (False, 3)):  # forward, the block again, the group again
        saving = MemoryOptions("sdpa_flash", True, 7, head_chunk=1, offload=offload)
        with Calls() as calls:
            model("gpt2", saving)(ids, labels, cu_seqlens=ends).backward()
        assert calls.passes == {"forward": passes * groups, "backward": groups}


@pytest.mark.parametrize(("shape", "residual"), [("gpt2", torch.bfloat16), ("llama", None)])
def test_under_autocast_the_stream_has_the_dtype_that_was_asked_for(shape, residual):
    ids, labels = shifted(2, 24)
    exact = model(shape)(ids, labels)
    for saving in (MemoryOptions(), MemoryOptions(checkpoint=True, mlp_chunk=7, loss_chunk=7)):
        decoder, seen = model(shape, replace(saving, residual=residual)), set()
        hook = decoder.blocks[1].register_forward_pre_hook(
            lambda _, args, seen=seen: seen.add(args[0].dtype)
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss, gradients = loss_and_gradients(decoder, ids, labels)
            assert decoder.hidden(ids).dtype == torch.bfloat16
        hook.remove()
        assert seen == {residual or torch.float32}
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(exact.item(), rel=0.02)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@pytest.mark.parametrize(("norm", "loss_chunk"), [("layer", None), ("rms", 8)])
def test_a_precision_policy_holds_in_every_part(norm, loss_chunk):
    policy = FlashAttentionConfig.float16(residual="float32", head="bfloat16", embedding="float32")
    model = Decoder(replace(SMALL, norm=norm), MemoryOptions("flash_torch", loss_chunk=loss_chunk))
    assert "not recognised" not in str(apply_precision_policy(model, policy))
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.update(stream=given[0].dtype))
    logits = model(torch.arange(12)[None])
    assert seen["stream"] == torch.float32
    assert logits.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float16
    loss = model(torch.arange(12)[None], torch.arange(1, 13)[None])
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None for p in model.parameters())


# --- with Transformers' weights it computes what GPT-2 and Llama compute --------------------------

INTERPOLATED = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
FAMILIES = {
    "gpt2": ("gpt2", {}),
    "gpt2, a classifier of its own": ("gpt2", {"tie_word_embeddings": False, "n_inner": 56}),
    "llama with grouped heads and biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama, interpolated": ("llama", {"rope_parameters": INTERPOLATED}),
}


def transformers_model(name):
    family, options = FAMILIES[name]
    hf = tiny(family, **options)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 1:  # biases of 0 and norms of 1 would hide that they are lost
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return hf


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name):
    hf = transformers_model(name)
    decoder = from_transformers(hf)
    ids, labels = shifted(2, 30)
    torch.testing.assert_close(decoder(ids), hf(ids).logits, rtol=0, atol=2e-5)

    # The same model again, with its gradients for weights: they find their places in the same way.
    loss = F.cross_entropy(hf(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    mine = loss_and_gradients(decoder, ids, labels)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.grad)
    theirs = dict(from_transformers(hf).named_parameters())
    assert_same_step(mine, (loss.detach(), theirs))


def test_converted_weights_are_copies_in_the_models_dtype():
    hf = tiny("gpt2", dtype=torch.bfloat16)
    decoder = from_transformers(hf)
    before = decoder.embedding.weight.clone()
    with torch.no_grad():
        hf.get_input_embeddings().weight.zero_()
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert torch.equal(decoder.embedding.weight, before)
    assert decoder.head.weight is decoder.embedding.weight


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mistral", {}, "MistralForCausalLM was given"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is relu"),
        ("llama", {"head_dim": 16}, "head_dim is 16"),
        ("llama", {"mlp_bias": True}, "attention_bias is False"),
        ("llama", {"rope_parameters": INTERPOLATED | {"rope_type": "dynamic"}}, "type dynamic"),
    ],
)
def test_models_that_a_decoder_cannot_compute_are_refused(family, options, said):
    with pytest.raises(ValueError, match=said):
        from_transformers(tiny(family, **options))
