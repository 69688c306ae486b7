"""The doctor's findings and the card of a machine; what is needed early starts without PyTorch."""

import subprocess
import sys

import pytest
import torch

from labsupport.profiling import environment
from labsupport.profiling.card import EnvironmentCard, environment_card


def test_the_preflight_and_the_monitor_import_no_torch():
    code = (
        "import sys\n"
        "from labsupport.commands.monitor import run_monitored\n"
        "from labsupport.profiling import environment, monitor\n"
        "print(len(environment.diagnose(quick=True)))\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert int(count) >= 6


def test_every_finding_that_is_not_ok_says_how_to_mend_it():
    full, quick = environment.diagnose(), environment.diagnose(quick=True)
    names = {check.name for check in full}
    assert {check.name for check in quick} < names
    assert {"GPU", "C++ compiler", "triton", "flash-attn", "flash-attn-4", "xformers"} <= names
    assert len(names) == len(full)
    assert [check for check in full if (check.status == "ok") == bool(check.remedy)] == []


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "status", "remedy"),
    [
        (None, None, None, "fail", "make lab"),
        ("2.9.1", None, None, "fail", "make lab"),
        ("2.11.0", None, None, "ok", ""),
        ("2.13.0+cpu", None, "/usr/bin/nvidia-smi", "warn", "make lab TORCH=cuda"),
        ("2.13.0", "13.0", "/usr/bin/nvidia-smi", "ok", ""),
        ("2.13.0", "13.0", None, "ok", ""),
    ],
)
def test_the_torch_build_is_judged_against_the_driver(version, cuda, driver, status, remedy):
    check = environment.judge_torch(version, cuda, driver)
    assert (check.status, check.remedy) == (status, remedy)


def test_the_cuda_version_is_torchs_own_and_the_working_copy_is_counted(tmp_path):
    assert environment.torch_cuda_version() == torch.version.cuda
    assert "none yet" in environment.check_working_copy(tmp_path).detail
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "01-a.ipynb").touch()
    assert "notebooks: 1" in environment.check_working_copy(tmp_path).detail


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


@pytest.mark.parametrize(
    ("check", "status", "remedy"),
    [
        (environment.check_python((3, 10, 9)), "fail", "install Python 3.11"),
        (environment.check_python((3, 11, 0)), "ok", ""),
        (environment.check_system("Windows"), "warn", "wsl"),
        (environment.check_capability((7, 5)), "warn", "sdpa_efficient"),
        (environment.check_capability((8, 0)), "ok", ""),
        (environment.check_no_gpu("13.0", "/dev/nvidiactl"), "warn", "nvidia-smi"),
        (environment.check_no_gpu(None, "/dev/nvidiactl"), "warn", "make lab TORCH=cuda"),
        (environment.check_no_gpu("13.0", None), "ok", ""),
    ],
)
def test_versions_systems_and_gpus_are_judged(check, status, remedy):
    assert check.status == status
    assert remedy in check.remedy


def test_the_card_lists_what_runs_here_and_why_the_rest_does_not():
    card = environment_card("cpu")
    assert {"standard", "flash_torch", "sdpa_flash"} <= set(card.runs)
    assert all(card.refused.values())
    assert len(str(card).splitlines()) <= 20
    assert f"Runs:     {card.runs[0]}" in str(card)
    html = EnvironmentCard([("Device", "a <b> device")], [], {"x": "<no>"})._repr_html_()
    assert "a &lt;b&gt; device" in html
    assert "x: &lt;no&gt;" in html
