"""llama2.c's files: number for number what run.c computes, and what is no such file."""

import math
import random
import struct

import numpy as np
import pytest
import sentencepiece
import torch

from labsupport.models.llama2c import halves_from_neighbours, read_checkpoint, read_tokenizer
from labsupport.models.sources.text import python_topics

BOS, FIRST_BYTE, FIRST_WORD = 1, 3, 259


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
                own = slice(head * size, (head + 1) * size)
                group = head // (heads // kv_heads)
                shared_kv = slice(group * size, (group + 1) * size)
                scores = np.array([query[own] @ key[shared_kv] for key in keys[layer]])
                weights = np.exp(scores / math.sqrt(size) - (scores / math.sqrt(size)).max())
                weights /= weights.sum()
                for weight, value in zip(weights, values[layer], strict=True):
                    mixed[own] += weight * value[shared_kv]
            x = x + wo[layer] @ mixed
            y = norm(x, feed_norm[layer])
            gate = w1[layer] @ y
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ y))
        logits.append(classifier @ norm(x, final_norm))
    return torch.from_numpy(np.stack(logits))


def relative_error(model, tokens, truth):
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return ((logits - truth).norm() / truth.norm()).item()


def write_random(path, *, heads=4, kv_heads=2, shared=True):
    """A checkpoint of random numbers."""
    dim, hidden, layers, vocabulary, length = 32, 44, 3, 50, 20
    sizes = [dim, hidden, layers, heads, kv_heads, vocabulary if shared else -vocabulary, length]
    kv_dim = kv_heads * dim // heads
    layer = 2 * dim * dim + 2 * kv_dim * dim + 3 * dim * hidden + 2 * dim
    count = (1 if shared else 2) * vocabulary * dim + layers * layer + dim + length * dim // heads
    numbers = np.random.default_rng(0).normal(scale=0.3, size=count).astype("<f4")
    path.write_bytes(struct.pack("<7i", *sizes) + numbers.tobytes())
    return path


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shared"), [(4, 4, True), (4, 2, False), (8, 1, True), (1, 1, False)]
)
def test_any_checkpoint_computes_in_transformers_what_run_c_computes(
    heads, kv_heads, shared, tmp_path
):
    path = write_random(tmp_path / "a.bin", heads=heads, kv_heads=kv_heads, shared=shared)
    model, tokens = read_checkpoint(path), [1, 5, 2, 49, 0, 17, 5, 5]
    truth = run_c(path, tokens)
    assert relative_error(model, tokens, truth) < 5e-6
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == shared
    assert model.generation_config.eos_token_id == [1, 2]  # where run.c ends a story


def test_so_does_stories15m_and_without_the_permutation_it_talks_nonsense(
    stories_folder, stories15m
):
    tokens = stories15m.tokenizer.encode("Once upon a time, Lily met a very big dog")
    truth = run_c(stories_folder / "stories15M.bin", tokens)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model = read_checkpoint(stories_folder / "stories15M.bin")
    assert torch.equal(torch.rand(2), expected)  # reading leaves the random numbers alone
    assert relative_error(model, tokens, truth) < 2e-6
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            weight = projection.weight.data.view(-1, 2, 24, 288)
            projection.weight.data = weight.transpose(1, 2).reshape(288, 288)
    assert relative_error(model, tokens, truth) > 0.1


def test_the_permutation_is_the_one_of_the_docstring_s_picture():
    neighbours = ["xa", "ya", "xb", "yb", "xc", "yc", "xd", "yd"]
    halves = ["xa", "xb", "xc", "xd", "ya", "yb", "yc", "yd"]
    rows = torch.arange(16.0)[:, None].expand(16, 3)  # two heads of 8
    moved = halves_from_neighbours(rows, 8)[:, 0].int().tolist()
    assert [neighbours[i] for i in moved[:8]] == halves
    assert [neighbours[i - 8] for i in moved[8:]] == halves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-4], "is damaged"),
        (lambda raw: raw + b"\0", "is damaged"),
        (lambda raw: raw[:20], "no llama2.c checkpoint"),
        (lambda raw: struct.pack("<i", 0x616B3432) + raw[4:], "version 0"),  # a later version
        (lambda raw: struct.pack("<4i", 32, 44, 3, 5) + raw[16:], "header"),  # 5 heads of 32
        (lambda raw: struct.pack("<3i", 32, 44, 0) + raw[12:], "header"),
        (lambda raw: struct.pack("<2i", 32, 2**31 - 1) + raw[8:], "is damaged"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_memory_is_taken(tmp_path, change, message):
    path = write_random(tmp_path / "a.bin")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


# --- the tokenizer --------------------------------------------------------------------------------

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "",
    "  two spaces, and three   inside ",
    "line\nbreak\ttab\r\n\nend\n",
    "Ünïcode: naïve café, 東京, Привет, 🙂👩‍👩‍👧 and \x00 nul",
    "digits 1234567890, 3.14\ndef f(x):\n    return {'a': x ** 2}\n",
    "<s> </s> <unk> <0x0A> \n<s>\n",
    "supercalifragilisticexpialidocious " * 5,
]


@pytest.fixture(scope="module")
def stories(stories_folder):
    return stories_folder / "tokenizer.bin"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A SentencePiece model of 800 tokens, trained as Llama's was, on Python's help."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = "\n".join(python_topics().values()).splitlines()[:2500]
    (folder / "text.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.995,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def pieces_of(path):
    """Each token's bytes and score in a tokenizer.bin."""
    raw, at, pieces = path.read_bytes(), 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append((raw[at + 8 : at + 8 + length], score))
        at += 8 + length
    return pieces


def as_run_c_does(pieces, text):
    """Look through all pairs for each merge, as run.c's `encode`: the best, the first of equals."""
    token_of = {pieces[i][0]: i for i in reversed(range(FIRST_WORD, len(pieces)))}
    tokens = []
    for character in " " + text if text else "":
        raw = character.encode()
        tokens += [token_of[raw]] if raw in token_of else [FIRST_BYTE + byte for byte in raw]
    while True:
        best, place, union = -1e10, None, None
        for i in range(len(tokens) - 1):
            found = token_of.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if found is not None and pieces[found][1] > best:
                best, place, union = pieces[found][1], i, found
        if place is None:
            return [BOS, *tokens]
        tokens[place : place + 2] = [union]


def test_tokens_are_those_of_run_c_and_the_text_comes_back(stories):
    tokenizer, pieces = read_tokenizer(stories), pieces_of(stories)
    draw = random.Random(0)
    texts = [*TEXTS]
    for alphabet in ("ab ", "the an\n", "aá€🙂 ", "".join(map(chr, range(32, 127)))):
        texts += ["".join(draw.choices(alphabet, k=draw.randrange(1, 40))) for _ in range(8)]
    for text in texts:
        assert tokenizer.encode(text) == as_run_c_does(pieces, text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    assert (len(tokenizer), tokenizer.eos_token_id) == (32_000, 2)


def test_both_files_of_a_vocabulary_give_sentencepiece_s_tokens(trained, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    with (tmp_path / "tokenizer.bin").open("wb") as file:  # as llama2.c's tokenizer.py does
        file.write(struct.pack("<i", 40))
        for token in range(len(processor)):
            piece = processor.IdToPiece(token).replace("▁", " ").encode()
            file.write(struct.pack("<fi", processor.GetScore(token), len(piece)) + piece)
    by_model, by_bin = read_tokenizer(trained), read_tokenizer(tmp_path / "tokenizer.bin")
    for text in [*TEXTS, "\n".join(python_topics().values())[:100_000]]:
        expected = [BOS, *processor.Encode(text)]
        assert by_model.encode(text) == by_bin.encode(text) == expected


def test_a_batch_is_padded_on_the_left_and_masked(stories):
    batch = read_tokenizer(stories)(["Once upon a time", "Hello"], padding=True)
    assert batch.input_ids == [[1, 9038, 2501, 263, 931], [2, 2, 2, 1, 15043]]
    assert batch.attention_mask == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:2],
        lambda raw: raw[: 4 + 8 + 5 + 3],
        lambda raw: struct.pack("<i", 4) + raw[4:],  # token 0 is longer than the longest
        lambda raw: raw[:8] + struct.pack("<i", -5) + raw[12:],
        lambda raw: raw[:4],  # no token at all
    ],
)
def test_a_malformed_tokenizer_bin_is_refused(stories, tmp_path, change):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(change(stories.read_bytes()))
    with pytest.raises(ValueError, match=r"cut off, or no tokenizer|no words beside its bytes"):
        read_tokenizer(path)
