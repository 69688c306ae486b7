"""llama2.c's files: the model and the tokens that run.c has, and what is no such file."""

import struct

import pytest
import sentencepiece
import torch

from labsupport.attention.rotary import permute_rotary_rows
from labsupport.models.generation.generate import generate
from labsupport.models.llama2c import read_checkpoint, read_tokenizer
from labsupport.models.sources.text import python_topics
from tests.models.tiny import tiny, tokens


def write_checkpoint(path, *, heads=4, kv_heads=2, shared=False):
    """Write a tiny model as llama2.c's export.py does; return the model."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5}
    model = tiny("llama", tie_word_embeddings=shared, max_position_embeddings=20, **sizes)
    layers = model.model.layers

    def each(name, heads=0):
        for layer in layers:
            weight = layer.get_submodule(name).weight
            yield permute_rotary_rows(weight, heads, to_interleaved=True) if heads else weight

    tensors = [
        model.model.embed_tokens.weight, *each("input_layernorm"),
        *each("self_attn.q_proj", heads), *each("self_attn.k_proj", kv_heads),
        *each("self_attn.v_proj"), *each("self_attn.o_proj"), *each("post_attention_layernorm"),
        *each("mlp.gate_proj"), *each("mlp.down_proj"), *each("mlp.up_proj"),
        model.model.norm.weight, torch.zeros(2, 20, 32 // heads // 2),  # tables that run.c skips
        *([] if shared else [model.lm_head.weight]),
    ]  # fmt: skip
    header = 32, 48, len(layers), heads, kv_heads, 61 if shared else -61, 20
    numbers = (tensor.detach().numpy().astype("<f4").tobytes() for tensor in tensors)
    path.write_bytes(struct.pack("<7i", *header) + b"".join(numbers))
    return model


@pytest.mark.parametrize(("heads", "kv_heads", "shared"), [(4, 2, False), (8, 1, True)])
def test_a_checkpoint_gives_the_model_that_was_written(heads, kv_heads, shared, tmp_path):
    path = tmp_path / "a.bin"
    model = write_checkpoint(path, heads=heads, kv_heads=kv_heads, shared=shared)
    read, ids = read_checkpoint(path), tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == shared
    assert read.generation_config.eos_token_id == [1, 2]  # where run.c ends a story


def test_stories15m_tells_the_story_that_run_c_tells(stories15m):
    """With the rows of wq and wk in the file's order it would talk nonsense."""
    done = generate(stories15m.model, stories15m.tokenizer, "Once upon a time", max_new_tokens=20)
    story = ", there was a little girl named Lily. She loved to play outside in the sunshine"
    assert done.text == story


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw + b"\0", "is damaged"),
        (lambda raw: raw[:20], "no llama2.c checkpoint"),
        (lambda raw: struct.pack("<i", 0x616B3432) + raw[4:], "version 0"),  # a later version
        (lambda raw: struct.pack("<4i", 32, 44, 3, 5) + raw[16:], "header"),  # 5 heads of 32
    ],
)
def test_what_is_no_checkpoint_is_refused_before_memory_is_taken(tmp_path, change, message):
    path = tmp_path / "a.bin"
    write_checkpoint(path)
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


def test_stories15m_s_tokens_are_llama_2_s_and_the_text_comes_back(stories15m):
    tokenizer = stories15m.tokenizer
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    assert (len(tokenizer), tokenizer.eos_token_id) == (32_000, 2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_both_files_of_a_vocabulary_give_sentencepiece_s_tokens(tmp_path):
    text = "\n".join(python_topics().values())[:100_000]
    (tmp_path / "text.txt").write_text(text)
    sentencepiece.SentencePieceTrainer.Train(  # as Llama's was trained, but small
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe", vocab_size=600, byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.995, minloglevel=2,
    )  # fmt: skip
    trained = tmp_path / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    raw = struct.pack("<i", 40)  # as llama2.c's tokenizer.py writes it
    for token in range(len(processor)):
        piece = processor.IdToPiece(token).replace("▁", " ").encode()
        raw += struct.pack("<fi", processor.GetScore(token), len(piece)) + piece
    (tmp_path / "tokenizer.bin").write_bytes(raw)
    by_model, by_bin = read_tokenizer(trained), read_tokenizer(tmp_path / "tokenizer.bin")
    for sample in [*TEXTS, text[:10_000]]:
        expected = [1, *processor.Encode(sample)]
        assert by_model.encode(sample) == by_bin.encode(sample) == expected
    for malformed in (
        raw[:-1],
        struct.pack("<i", 4) + raw[4:],  # token 0 is longer than the longest
        raw[:4],  # no token at all
    ):
        (tmp_path / "tokenizer.bin").write_bytes(malformed)
        with pytest.raises(ValueError, match=r"cut off, or no tokenizer|no words beside its bytes"):
            read_tokenizer(tmp_path / "tokenizer.bin")
