import subprocess
import sys

import pytest

from labsupport.profiling import environment
from labsupport.profiling.card import EnvironmentCard, environment_card
from labsupport.profiling.health import Check


def by_name(checks):
    return {check.name: check for check in checks}


def test_the_quick_preflight_does_not_import_torch():
    code = (
        "import sys\n"
        "from labsupport.profiling import environment\n"
        "checks = environment.diagnose(quick=True)\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "print(len(checks), sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(count) >= 6


@pytest.mark.parametrize("quick", [True, False])
def test_every_finding_that_is_not_ok_says_how_to_mend_it(quick):
    checks = environment.diagnose(quick=quick)
    assert len({check.name for check in checks}) == len(checks)
    assert [check for check in checks if check.status != "ok" and not check.remedy] == []
    assert [check for check in checks if check.status == "ok" and check.remedy] == []


def test_the_full_diagnosis_adds_the_gpu_and_the_optional_packages():
    full, quick = by_name(environment.diagnose()), by_name(environment.diagnose(quick=True))
    assert set(quick) < set(full)
    assert {"GPU", "C++ compiler", "triton", "flash-attn", "flash-attn-4", "xformers"} <= set(full)


def test_a_finding_is_a_line():
    assert (
        str(Check("GPU", "warn", "a detail", "a command")) == "[warn] GPU: a detail  -> a command"
    )


def test_an_old_python_fails():
    assert environment.check_python((3, 10, 14)).status == "fail"
    assert environment.check_python((3, 11, 0)).status == "ok"


def test_windows_is_pointed_to_wsl():
    check = environment.check_system("Windows")
    assert check.status == "warn"
    assert "wsl" in check.remedy


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "status", "remedy"),
    [
        (None, None, None, "fail", "make lab"),
        ("2.9.1", None, None, "fail", "make lab"),
        ("2.13.0+cpu", None, None, "ok", ""),
        ("2.13.0+cpu", None, "/usr/bin/nvidia-smi", "warn", "make lab TORCH=cuda"),
        ("2.13.0", "13.0", "/usr/bin/nvidia-smi", "ok", ""),
        ("2.13.0", "13.0", None, "ok", ""),
    ],
)
def test_the_torch_build_is_judged_against_the_driver(version, cuda, driver, status, remedy):
    check = environment.judge_torch(version, cuda, driver)
    assert (check.status, check.remedy) == (status, remedy)


def test_the_cuda_version_read_from_the_file_is_torchs_own():
    import torch

    assert environment.torch_cuda_version() == torch.version.cuda


def test_a_project_folder_that_is_missing_is_a_finding_not_a_crash(monkeypatch, tmp_path):
    monkeypatch.setenv("LABSUPPORT_ROOT", str(tmp_path))
    checks = by_name(environment.diagnose(quick=True))
    assert checks["Project folder"].status == "fail"


def test_the_working_copy_is_counted(tmp_path):
    assert "none yet" in environment.check_working_copy(tmp_path).detail
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "01-a.ipynb").touch()
    assert "notebooks: 1" in environment.check_working_copy(tmp_path).detail


@pytest.mark.parametrize(
    ("capability", "status"), [((7, 0), "warn"), ((7, 5), "warn"), ((8, 0), "ok"), ((9, 0), "ok")]
)
def test_below_capability_8_the_efficient_backend_is_recommended(capability, status):
    check = environment.check_capability(capability)
    assert check.status == status
    assert ("sdpa_efficient" in check.remedy) == (status == "warn")


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


def test_a_gpu_that_does_not_start_is_a_warning_and_none_is_fine():
    assert environment.check_no_gpu("13.0", "/dev/nvidiactl").status == "warn"
    assert environment.check_no_gpu(None, "/dev/nvidiactl").remedy == "make lab TORCH=cuda"
    assert environment.check_no_gpu(None, None).status == "ok"


def test_the_card_lists_what_runs_here_and_why_the_rest_does_not():
    card = environment_card("cpu")
    assert {"standard", "flash_torch", "sdpa_flash"} <= set(card.runs)
    assert all(card.refused.values())
    assert len(str(card).splitlines()) <= 20
    assert f"Runs:     {card.runs[0]}" in str(card)


def test_the_card_escapes_html():
    html = EnvironmentCard([("Device", "a <b> device")], [], {"x": "<no>"})._repr_html_()
    assert "a &lt;b&gt; device" in html
    assert "x: &lt;no&gt;" in html
