"""llama2.c's checkpoints: byte for byte, number for number, and what is no checkpoint."""

import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labsupport.models.llama2c import checkpoint
from labsupport.models.llama2c.checkpoint import (
    halves_from_neighbours,
    neighbours_from_halves,
    read_checkpoint,
    read_header,
    rope_tables,
    write_checkpoint,
)


def llama(heads=4, kv_heads=4, shared=True, seed=0, **options):
    """A Llama that run.c can run, with random weights, norms included."""
    config = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 20,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shared,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config | options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def run_c(path, tokens):
    """The logits of run.c for each position, (tokens, vocabulary), in float64.

    Written from run.c's `forward`, straight from the file: no order but the file's own.
    """
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, seq_len = struct.unpack("<7i", raw[:28])
    shared, vocabulary, size = vocabulary > 0, abs(vocabulary), dim // heads
    numbers, at = np.frombuffer(raw, "<f4", offset=28), 0

    def take(*shape):
        nonlocal at
        at += math.prod(shape)
        return numbers[at - math.prod(shape) : at].reshape(shape).astype(np.float64)

    embedding, attention_norm = take(vocabulary, dim), take(layers, dim)
    wq, wk = take(layers, heads * size, dim), take(layers, kv_heads * size, dim)
    wv, wo = take(layers, kv_heads * size, dim), take(layers, dim, heads * size)
    feed_norm = take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    final_norm = take(dim)
    take(seq_len, size)  # both tables of RoPE
    classifier = embedding if shared else take(vocabulary, dim)
    assert at == len(numbers)

    def norm(x, weight):
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def turn(vector, position):
        out = vector.copy()
        for i in range(0, len(vector), 2):
            angle = position / 10000.0 ** ((i % size) / size)
            x, y = vector[i], vector[i + 1]
            out[i] = x * math.cos(angle) - y * math.sin(angle)
            out[i + 1] = x * math.sin(angle) + y * math.cos(angle)
        return out

    keys, values, logits = [[] for _ in range(layers)], [[] for _ in range(layers)], []
    for position, token in enumerate(tokens):
        x = embedding[token]
        for layer in range(layers):
            y = norm(x, attention_norm[layer])
            query = turn(wq[layer] @ y, position)
            keys[layer].append(turn(wk[layer] @ y, position))
            values[layer].append(wv[layer] @ y)
            mixed = np.zeros(dim)
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                group = head // (heads // kv_heads)
                theirs = slice(group * size, (group + 1) * size)
                scores = np.array([query[mine] @ key[theirs] for key in keys[layer]])
                weights = np.exp(scores / math.sqrt(size) - (scores / math.sqrt(size)).max())
                weights /= weights.sum()
                for weight, value in zip(weights, values[layer], strict=True):
                    mixed[mine] += weight * value[theirs]
            x = x + wo[layer] @ mixed
            y = norm(x, feed_norm[layer])
            gate = w1[layer] @ y
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ y))
        logits.append(classifier @ norm(x, final_norm))
    return torch.from_numpy(np.stack(logits))


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double()


def relative(error, truth):
    return ((error - truth).norm() / truth.norm()).item()


def test_stories15m_computes_in_transformers_what_run_c_computes(stories_folder, stories15m):
    tokens = stories15m.tokenizer.encode("Once upon a time, Lily met a very big dog")
    truth = run_c(stories_folder / "stories15M.bin", tokens)
    model = read_checkpoint(stories_folder / "stories15M.bin")
    assert relative(logits_of(model, tokens), truth) < 2e-6
    assert relative(logits_of(model.double(), tokens), truth) < 1e-6  # RoPE's angles: float32


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("shared", [True, False])
def test_any_model_computes_the_same_after_a_trip_through_a_file(heads, kv_heads, shared, tmp_path):
    model = llama(heads, kv_heads, shared)
    write_checkpoint(model, tmp_path / "a.bin")
    again = read_checkpoint(tmp_path / "a.bin")
    tokens = [1, 5, 2, 49, 0, 17, 5, 5]
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == shared
    assert relative(logits_of(model, tokens), run_c(tmp_path / "a.bin", tokens)) < 5e-6
    assert set(again.state_dict()) == set(model.state_dict())
    write_checkpoint(again, tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_stories15m_is_written_back_byte_for_byte(stories_folder, tmp_path):
    original = stories_folder / "stories15M.bin"
    write_checkpoint(read_checkpoint(original), tmp_path / "copy.bin")
    hashes = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (original, tmp_path / "copy.bin")]
    assert hashes[0] == hashes[1]
    assert {path.name for path in tmp_path.iterdir()} == {"copy.bin"}


def test_the_tables_of_a_new_file_are_those_of_stories15m_but_for_the_last_bits(stories_folder):
    with (stories_folder / "stories15M.bin").open("rb") as file:
        header = read_header(file)
    kept = getattr(read_checkpoint(stories_folder / "stories15M.bin"), checkpoint.TABLES)
    assert (rope_tables(header) - kept).abs().max() < 1e-6


def test_the_permutation_is_the_one_of_the_docstring_s_picture():
    neighbours = ["xa", "ya", "xb", "yb", "xc", "yc", "xd", "yd"]
    halves = ["xa", "xb", "xc", "xd", "ya", "yb", "yc", "yd"]
    rows = torch.arange(16.0)[:, None].expand(16, 3)  # two heads of 8
    moved = halves_from_neighbours(rows, 8)[:, 0].int().tolist()
    assert [neighbours[i] for i in moved[:8]] == halves
    assert [neighbours[i - 8] for i in moved[8:]] == halves
    assert torch.equal(neighbours_from_halves(halves_from_neighbours(rows, 8), 8), rows)


def test_without_the_permutation_the_model_talks_nonsense(stories_folder, stories15m):
    """And no error says so: hence the test against run.c above."""
    tokens = stories15m.tokenizer.encode("Once upon a time")
    model = read_checkpoint(stories_folder / "stories15M.bin")
    right = logits_of(model, tokens)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data = neighbours_from_halves(projection.weight.data, 48)
    assert relative(logits_of(model, tokens), right) > 0.1


def test_reading_leaves_the_random_numbers_alone(stories_folder):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    read_checkpoint(stories_folder / "stories15M.bin")
    assert torch.equal(torch.rand(2), expected)


def test_a_story_ends_where_run_c_ends_it(stories15m):
    assert stories15m.model.generation_config.eos_token_id == [1, 2]


def test_sixteen_bit_weights_are_written_exactly(tmp_path):
    model = llama().to(torch.bfloat16)
    write_checkpoint(model, tmp_path / "a.bin")
    assert torch.equal(
        read_checkpoint(tmp_path / "a.bin").lm_head.weight, model.lm_head.weight.float()
    )


# --- what is no checkpoint ----------------------------------------------------------------------

GOOD = {"dim": 32, "hidden_dim": 44, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4}
GOOD |= {"vocab_size": 50, "seq_len": 20}


def changed_file(tmp_path, change):
    write_checkpoint(llama(), tmp_path / "a.bin")
    raw = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(change(raw))
    return tmp_path / "a.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-4], "is cut off"),
        (lambda raw: raw[:100], "is cut off"),
        (lambda raw: raw + b"\0", "goes on after its end"),
        (lambda raw: raw[:20], "20 bytes, no header"),
        (lambda raw: b"", "0 bytes, no header"),
    ],
)
def test_a_file_of_another_length_than_its_header_says_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=rf"a\.bin.*{message}"):
        read_checkpoint(changed_file(tmp_path, change))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, "n_layers = 0"),
        ("dim", -32, "dim = -32"),
        ("seq_len", -1, "seq_len = -1"),
        ("vocab_size", 0, "vocab_size = 0"),
        ("n_heads", 5, "dim 32 must be a multiple of n_heads 5"),
        ("n_kv_heads", 3, "n_heads a multiple of n_kv_heads 3"),
        ("n_heads", 32, "even number for each head"),
        ("hidden_dim", 2**31 - 1, "is cut off"),
        ("vocab_size", -50, "is cut off"),
        ("dim", 0x616B3432, "version 1 or 2"),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_memory_is_taken(tmp_path, field, value, message):
    header = struct.pack("<7i", *(GOOD | {field: value}).values())
    with pytest.raises(ValueError, match=message):
        read_checkpoint(changed_file(tmp_path, lambda raw: header + raw[28:]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 500000"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is linear",
        ),
        ({"attention_bias": True}, "its attention has biases"),
        ({"mlp_bias": True}, "feed-forward layers have biases"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    ],
)
def test_what_run_c_cannot_compute_is_not_written(tmp_path, options, reason):
    with pytest.raises(ValueError, match=f"llama2.c cannot run this model: .*{reason}"):
        write_checkpoint(llama(**options), tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


def test_all_reasons_are_given_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"rms_norm_eps .*; its attention has biases; weights of"):
        write_checkpoint(llama(rms_norm_eps=1e-6, attention_bias=True).double(), tmp_path / "a.bin")


def test_smollm2_cannot_be_written_because_of_its_rope(smollm2, tmp_path):
    with pytest.raises(ValueError, match="rope_theta is 100000"):
        write_checkpoint(smollm2.model, tmp_path / "a.bin")


def test_another_architecture_is_refused(tmp_path):
    from tests.models.tiny import tiny

    with pytest.raises(ValueError, match="it is a GPT2LMHeadModel, not a LlamaForCausalLM"):
        write_checkpoint(tiny("gpt2"), tmp_path / "a.bin")
