import pytest

from labsupport.profiling.presets import PRESETS, describe_presets, preset


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "causal"),
    [
        ("gpt2-small", 12, 64, True),
        ("gpt3", 96, 128, True),
        ("bert-base", 12, 64, False),
        ("bert-large", 16, 64, False),
        ("long-8k", 32, 128, True),
    ],
)
def test_a_preset_has_the_heads_and_the_mask_of_its_model(name, heads, head_dim, causal):
    shape = PRESETS[name]
    assert (shape.heads, shape.head_dim, shape.causal) == (heads, head_dim, causal)


def test_presets_are_described_with_their_source_and_others_refused():
    text = describe_presets()
    for name, shape in PRESETS.items():
        assert {name, shape.about, shape.source} == {
            part for part in (name, shape.about, shape.source) if part in text
        }
    with pytest.raises(ValueError, match=r"'gpt5'.*gpt2-small, gpt3"):
        preset("gpt5")
