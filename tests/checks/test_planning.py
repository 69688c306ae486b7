import pytest
import torch

from labsupport import checks
from labsupport.profiling import measure_peak_memory
from labsupport.training.model import Decoder, DecoderConfig, Savings
from tests.checks.solutions import broken, function, solution_source


def source():
    return solution_source("03", "ex-3-3-kept-bytes")


BLOCKS, CHECKPOINT, LOSS = ALL = (
    checks.check_kept_blocks,
    checks.check_kept_checkpoint,
    checks.check_kept_loss,
)


def diagnosis(student, *some):
    with pytest.raises(checks.CheckFailed) as caught:
        for check in some or ALL:
            check(student)
    return str(caught.value)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solution_passes(check, seed, capsys):
    check(function(source(), "kept_bytes"), seed=seed)
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


SCORES, MOMENTS = "heads * seqlen**2", "max(at_loss, in_mlp, in_attention)"
BLOCK = "8 * seqlen * width + mlp + scores"
STEP = "layers * (seqlen * width if checkpoint else block)"
MISTAKES = {
    "elements": (BLOCKS, [("itemsize * (kept", "(kept")], "counts numbers"),
    "always 4 bytes": (BLOCKS, [("itemsize * (kept", "4 * (kept")], "`itemsize` is ignored"),
    "scores once a layer": (BLOCKS, [(SCORES, "seqlen**2")], "Every head has scores"),
    "scores in one layer": (BLOCKS, [(STEP, "layers * (block - scores) + scores")], "until its own backward"),
    "scores halved": (BLOCKS, [(SCORES, "heads * seqlen**2 // 2")], "halved the matrix"),
    "scores always": (BLOCKS, [("if stores_scores", "if True")], "FlashAttention keeps none"),
    "scores never": (BLOCKS, [("if stores_scores", "if False")], "probabilities are missing"),
    "scores kept too": (BLOCKS, [("mlp + scores", "mlp + 2 * scores")], "one matrix a head"),
    "no gradients of scores": (BLOCKS, [("+ 2 * scores", "+ 0 * scores")], "two more matrices a head"),
    "MLP still there": (BLOCKS, [("2 * scores - mlp", "2 * scores")], "MLP's two tensors of that block are gone"),
    "no gradient in the MLP": (BLOCKS, [("classifier + seqlen * mlp_width", "classifier")], "one gradient"),
    "moments added": (BLOCKS, [("max(at_loss, in_mlp, in_attention)", "at_loss + in_mlp + in_attention")], "added up the moments"),
    "whole moments added": (LOSS, [("(kept + max(at_loss, in_mlp, in_attention))", "(kept + at_loss + kept + in_mlp)")], "what is kept in each"),
    "MLP once": (BLOCKS, [(BLOCK, "8 * seqlen * width + mlp // 2 + scores")], "keeps two tensors"),
    "no MLP": (BLOCKS, [(BLOCK, "8 * seqlen * width + scores")], "What the MLP keeps is missing"),
    "mlp_width is width": (BLOCKS, [("2 * seqlen * mlp_width", "2 * seqlen * width"), ("+ seqlen * mlp_width", "+ seqlen * width")], "not width"),
    "no q, k, v": (BLOCKS, [(BLOCK, "5 * seqlen * width + mlp + scores")], "q, k and v are missing"),
    "no norms' outputs": (BLOCKS, [(BLOCK, "6 * seqlen * width + mlp + scores")], "outputs of the two norms"),
    "one layer": (BLOCKS, [(STEP, "(layers * seqlen * width if checkpoint else block)")], "multiply by layers"),
    "checkpoint always": (BLOCKS, [("    again =", "    checkpoint = True\n    again ="), ("if checkpoint else block)", "if True else block)")], "Without checkpoint"),
    "no classifier gradient": (BLOCKS, [("classifier = vocab * width", "classifier = 0")], "gradient of the classifier"),
    "checkpoint ignored": (CHECKPOINT, [("if checkpoint else block", "if False else block"), ("block if checkpoint", "block if False")], "`checkpoint` is ignored"),
    "checkpoint keeps nothing": (CHECKPOINT, [("(seqlen * width if", "(0 if")], "still keeps its input"),
    "block forgotten": (CHECKPOINT, [("block if checkpoint else 0", "0")], "recomputed is missing"),
    "all blocks recomputed": (CHECKPOINT, [("again = block", "again = layers * block")], "One block is recomputed"),
    "block at the loss": (LOSS, [("    in_mlp =", "    at_loss += again\n    in_mlp =")], "no block is being recomputed yet"),
    "no logits": (LOSS, [("3 * seqlen * vocab", "0"), ("min(loss_chunk, seqlen) * vocab +", "")], "logits are missing"),
    "logits once": (LOSS, [("3 * seqlen * vocab", "seqlen * vocab")], "two gradients on their way"),
    "logits twice": (LOSS, [("3 * seqlen * vocab", "2 * seqlen * vocab")], "not two"),
    "chunk thrice": (LOSS, [("= min(loss_chunk", "= 3 * min(loss_chunk")], "changes in place"),
    "chunk ignored": (LOSS, [("loss_chunk is None", "True")], "`loss_chunk` is ignored"),
    "chunk not cut": (LOSS, [("min(loss_chunk, seqlen)", "loss_chunk")], "min(loss_chunk, seqlen)"),
    "logits in every layer": (LOSS, [("    in_mlp =", "    at_loss *= layers\n    in_mlp =")], "one classifier"),
    "text": (BLOCKS, [("return itemsize *", "return f'{itemsize}' or")], "not str"),
    "something else": (BLOCKS, [("return itemsize *", "return 1000 + itemsize *")], "largest moment is"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(check, changes, said):
    assert said in diagnosis(broken(source(), "kept_bytes", *changes), check)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("check", "changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_found_with_other_inputs_too(check, changes, said, seed):
    with pytest.raises(checks.CheckFailed) as caught:
        check(broken(source(), "kept_bytes", *changes), seed=seed)
    assert said in str(caught.value)


def test_a_stub_is_called_one():
    def kept_bytes(*sizes, **options):
        raise NotImplementedError

    assert "not written yet" in diagnosis(kept_bytes)


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
    savings = Savings(attention=backend, checkpoint=checkpoint, loss_chunk=chunk)
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
