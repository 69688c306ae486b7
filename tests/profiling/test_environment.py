"""The doctor's findings and the card of a machine."""

import pytest
import torch

from labsupport.profiling import environment
from labsupport.profiling.card import EnvironmentCard, environment_card


def test_every_finding_that_is_not_ok_says_how_to_mend_it():
    full, quick = environment.diagnose(), environment.diagnose(quick=True)
    names = {check.name for check in full}
    assert {check.name for check in quick} < names
    assert {"GPU", "C++ compiler", "triton", "flash-attn", "flash-attn-4", "xformers"} <= names
    assert len(names) == len(full)
    assert [check for check in full if (check.status == "ok") == bool(check.remedy)] == []
    assert environment.torch_cuda_version() == torch.version.cuda


DRIVER = "/usr/bin/nvidia-smi"


@pytest.mark.parametrize(
    ("check", "status", "remedy"),
    [
        (environment.judge_torch(None, None, None), "fail", "make lab"),
        (environment.judge_torch("2.9.1", None, None), "fail", "make lab"),
        (environment.judge_torch("2.11.0", None, None), "ok", ""),
        (environment.judge_torch("2.13.0+cpu", None, DRIVER), "warn", "make lab TORCH=cuda"),
        (environment.judge_torch("2.13.0", "13.0", DRIVER), "ok", ""),
        (environment.judge_torch("2.13.0", "13.0", None), "ok", ""),
        (environment.check_python((3, 10, 9)), "fail", "install Python 3.11"),
        (environment.check_python((3, 11, 0)), "ok", ""),
        (environment.check_capability((7, 5)), "warn", "sdpa_efficient"),
        (environment.check_capability((8, 0)), "ok", ""),
        (environment.check_no_gpu("13.0", DRIVER), "warn", "nvidia-smi"),
        (environment.check_no_gpu(None, DRIVER), "warn", "make lab TORCH=cuda"),
        (environment.check_no_gpu("13.0", None), "ok", ""),
    ],
)
def test_versions_builds_and_gpus_are_judged(check, status, remedy):
    assert check.status == status
    assert remedy in check.remedy
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        (None, set()),
        ((7, 5), {"triton"}),
        ((8, 6), {"triton", "flash-attn"}),
        ((9, 0), {"triton", "flash-attn", "flash-attn-4"}),
        ((12, 0), {"triton", "flash-attn"}),
    ],
)
def test_a_missing_package_is_a_warning_only_where_it_would_run(monkeypatch, capability, wanted):
    monkeypatch.setattr(environment, "package_version", lambda name: None)
    checks = environment.check_optional(capability)
    assert {c.name for c in checks if c.status == "warn"} - {"C++ compiler"} == wanted


def test_the_card_lists_what_runs_here_and_why_the_rest_does_not():
    card = environment_card("cpu")
    assert {"standard", "flash_torch", "sdpa_flash"} <= set(card.runs)
    assert all(card.refused.values())
    assert f"Runs:     {card.runs[0]}" in str(card)
    html = EnvironmentCard([("Device", "a <b> device")], [], {"x": "<no>"})._repr_html_()
    assert "a &lt;b&gt; device" in html
    assert "x: &lt;no&gt;" in html
