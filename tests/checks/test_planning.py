import pytest
import torch

from labsupport import checks
from labsupport.checks import planning
from labsupport.checks.verdict import Mistake
from labsupport.profiling import measure_peak_memory
from labsupport.training import Decoder, DecoderConfig, MemoryOptions
from tests.checks.solutions import diagnosis, each, function, solution_source

ALL = (checks.check_kept_blocks, checks.check_kept_checkpoint, checks.check_kept_loss)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solution_passes(check, seed, capsys):
    check(function(solution_source("03", "ex-3-3-kept-bytes"), "kept_bytes"), seed=seed)
    assert capsys.readouterr().out.startswith("[ok]")


@pytest.mark.parametrize("check", ALL)
def test_the_labs_own_formula_passes(check):
    check(checks.held_bytes)


@pytest.mark.parametrize("check", ALL)
def test_another_right_way_passes(check):
    """Tensor by tensor, each with its bytes."""

    def by_tensors(
        seqlen,
        width,
        layers,
        heads,
        mlp_width,
        vocab,
        *,
        stores_scores,
        checkpoint,
        loss_chunk,
        itemsize=4,
    ):
        token = float(seqlen * itemsize)
        norms, attention, mlp = 4 * width * token, 4 * width * token, 2 * mlp_width * token
        matrix = heads * seqlen * token
        block = sum((norms, attention, mlp), matrix if stores_scores else 0.0)
        before = sum(token * width if checkpoint else block for _ in range(layers))
        table = float(vocab * width * itemsize)
        if loss_chunk:
            peaks = [min(seqlen, loss_chunk) * vocab * itemsize + table]
        else:
            peaks = [token * vocab * 3]
        peaks.append(table + block * checkpoint + token * mlp_width)
        if stores_scores:
            peaks.append(table + block * checkpoint + matrix + matrix - mlp)
        return max(before + peak for peak in peaks)

    check(by_tensors)


OTHERS = (
    Mistake(("return itemsize *", "return f'{itemsize}' or"), "not str"),
    Mistake(("return itemsize *", "return 1000 + itemsize *"), "largest moment is"),
)


@pytest.mark.parametrize("seed", [0, 1])
@each((ALL, planning.held_bytes, planning.MISTAKES + OTHERS))
def test_each_mistake_gets_its_own_diagnosis(check, student, said, seed):
    assert said in diagnosis(check, student, seed=seed)


def test_a_stub_is_called_one():
    def kept_bytes(*sizes, **options):
        raise NotImplementedError

    assert "not written yet" in diagnosis(ALL, kept_bytes)


MEASURED = [
    # seqlen, vocab, stores_scores, checkpoint, loss_chunk
    (1024, 257, False, False, None),
    (1024, 257, False, True, 128),
    (512, 257, True, False, 128),
    (512, 257, True, True, 128),
    (512, 8000, False, False, None),
    (512, 8000, False, True, 600),
]


@pytest.mark.parametrize(("seqlen", "vocab", "stores_scores", "checkpoint", "chunk"), MEASURED)
def test_the_rules_come_within_a_tenth_of_a_measured_step(
    seqlen, vocab, stores_scores, checkpoint, chunk
):
    shape = {"width": 128, "layers": 3, "heads": 4}
    backend = "standard" if stores_scores else "sdpa_flash"
    savings = MemoryOptions(attention=backend, checkpoint=checkpoint, loss_chunk=chunk)
    model = Decoder(DecoderConfig(vocab_size=vocab, **shape), savings)
    for parameter in model.parameters():  # the rules count none of the weights' gradients
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(vocab, (1, seqlen), generator=torch.Generator().manual_seed(0))

    measured = measure_peak_memory(lambda: model(tokens, tokens).backward(), device="cpu")
    predicted = checks.held_bytes(
        seqlen,
        **shape,
        mlp_width=512,
        vocab=vocab,
        stores_scores=stores_scores,
        checkpoint=checkpoint,
        loss_chunk=chunk,
    )
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.1)
