import pytest

from labsupport.profiling.presets import PRESETS, describe_presets, preset


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "width", "causal"),
    [
        ("gpt2-small", 12, 64, 768, True),
        ("gpt3", 96, 128, 12288, True),
        ("bert-base", 12, 64, 768, False),
        ("bert-large", 16, 64, 1024, False),
        ("long-8k", 32, 128, 4096, True),
    ],
)
def test_a_preset_has_the_heads_and_the_mask_of_its_model(name, heads, head_dim, width, causal):
    shape = PRESETS[name]
    assert (shape.heads, shape.head_dim, shape.causal) == (heads, head_dim, causal)
    assert shape.heads * shape.head_dim == width


def test_the_long_contexts_are_as_long_as_they_say_and_share_keys():
    assert [PRESETS[f"long-{size}"].seqlen for size in ("8k", "16k")] == [8192, 16384]
    assert all(32 % PRESETS[f"long-{size}"].kv_heads == 0 for size in ("8k", "16k"))


def test_inference_has_the_largest_batch():
    assert max(PRESETS, key=lambda name: PRESETS[name].batch) == "inference-batch"


def test_every_preset_is_described_with_its_source():
    text = describe_presets()
    for name, shape in PRESETS.items():
        assert name in text
        assert shape.about in text
        assert shape.source in text


def test_an_unknown_preset_is_answered_with_those_that_exist():
    with pytest.raises(ValueError, match=r"'gpt5'.*gpt2-small, gpt3"):
        preset("gpt5")
