"""Does attention work here?  The part of a bug report that needs PyTorch.

`python -m labsupport.profiling.bug_report.attention` prints it as Markdown. It is a program of its
own: should PyTorch, a driver or a kernel crash or hang, what was printed until then is in the
report, and the report says how it ended.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

SELF_TEST_SECONDS = 10.0
DTYPES = ("float32", "float16", "bfloat16")
LIBRARIES = {
    "fa2": "flash-attn",
    "fa4": "flash-attn-4",
    "xformers": "xformers",
    "flash_triton": "triton",
}
# Their first call compiles: they come last, so that the others are not kept waiting.
COMPILED = ("flash_triton", "fa4", "flex")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LENGTHS = (100, 150)  # queries, keys: bottom-right causal masks, and no multiple of a tile


def main() -> None:
    """Print all sections; what fails in one does not touch the next."""
    if not _torch_imports():
        return
    for title, section in (
        ("PyTorch", _torch_build),
        ("Device, and optional packages", _device),
        ("Backends of attention", _backends),
        ("FlashAttention libraries", _libraries),
        ("Which kernel ran", _kernels),
        ("Self-test", self_test),
    ):
        print(f"\n## {title}\n\n```text", flush=True)
        try:
            section()
        except Exception:
            traceback.print_exc(file=sys.stdout)
        print("```", flush=True)


def _torch_imports() -> bool:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "torch":
            print("\n## PyTorch\n\nPyTorch is not installed: nothing below could be tried.")
            return False
        _say_broken()
        return False
    except Exception:
        _say_broken()
        return False
    return True


def _say_broken() -> None:
    print("\n## PyTorch\n\nPyTorch is installed, but does not import:\n\n```text", flush=True)
    traceback.print_exc(file=sys.stdout)
    print("```")


def _torch_build() -> None:
    import torch

    print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}")
    print(f"git {torch.version.git_version}")
    print(f"threads {torch.get_num_threads()}, CUDA starts: {torch.cuda.is_available()}")
    if torch.cuda.is_available():
        print(f"cuDNN {torch.backends.cudnn.version()}")
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            print(
                f"GPU {index}: {properties.name}, compute capability "
                f"{properties.major}.{properties.minor}, {properties.total_memory / 2**30:.1f} GiB"
            )


def _device() -> None:
    from labsupport.profiling.environment import check_device

    for check in check_device():
        print(check)


def _backends() -> None:
    from labsupport.attention.backends import available_backends

    print(available_backends())


def _libraries() -> None:
    import torch

    from labsupport.attention.backends import available_backends
    from labsupport.profiling.provenance import package_version

    table = available_backends()
    how = "imported" if torch.cuda.is_available() else "looked for only, as there is no GPU"
    for backend, package in LIBRARIES.items():
        version = package_version(package)
        state = table[backend]
        says = "usable" if state.runs else "; ".join(state.reasons)
        print(
            f"{package}: {f'version {version}' if version else 'not installed'}; {backend}: {says}"
        )
    print(f"({how})")


def _kernels() -> None:
    from labsupport.attention.backends import attention, last_call

    for dtype in DTYPES:
        _, k, v = _inputs(dtype)
        q = k.repeat_interleave(HEADS // KV_HEADS, dim=2)  # as many queries as keys
        try:
            attention(q, k, v, causal=True)
        except Exception as error:
            print(f"{dtype}: {type(error).__name__}: {error}")
        else:
            print(f"{dtype}, causal: {last_call()}")


def self_test(
    seconds: float = SELF_TEST_SECONDS, attention: Callable[..., Any] | None = None
) -> bool:
    """Judge every backend by flash-attn's rule, and one backward pass for each dtype.

    Args:
        seconds: no new call is begun after so long, but for the first.
        attention: what is tested; by default `labsupport.attention.attention`.

    Returns:
        whether all that was run passed; each is printed.
    """
    import torch

    from labsupport.attention.accuracy import compare_with_oracle
    from labsupport.attention.backends import attention as front_door
    from labsupport.attention.backends import available_backends

    attention = cast("Callable[..., Any]", front_door if attention is None else attention)
    end = time.monotonic() + seconds
    passed = failed = left_out = 0
    for dtype in DTYPES:
        q, k, v = _inputs(dtype)
        exact, exact_grad = _oracle(q, k, v)
        leaf = q.clone().requires_grad_()
        textbook = cast("torch.Tensor", front_door(leaf, k, v, causal=True, backend="standard"))
        (textbook_grad,) = torch.autograd.grad(textbook, leaf, torch.ones_like(textbook))
        runs = [state.name for state in available_backends(q, k, v, causal=True) if state.runs]
        runs = [name for name in runs if name != "standard" and not _too_slow(name, q)]
        for name in ("auto", *sorted(runs, key=COMPILED.__contains__)):
            if passed + failed and time.monotonic() > end:
                left_out += 1
                continue
            try:
                leaf = q.clone().requires_grad_(name == "auto")
                out = attention(leaf, k, v, causal=True, backend=name)
                reports = {"forward": compare_with_oracle(out.detach(), textbook.detach(), exact)}
                if name == "auto":
                    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
                    reports["gradient"] = compare_with_oracle(
                        grad, textbook_grad, exact_grad, gradient=True
                    )
            except Exception as error:
                failed += 1
                print(f"FAIL {dtype} {name}: {type(error).__name__}: {error}", flush=True)
                continue
            for what, report in reports.items():
                passed, failed = passed + report.ok, failed + (not report.ok)
                print(
                    f"{'pass' if report.ok else 'FAIL'} {dtype} {name}, {what}: {report}",
                    flush=True,
                )
    print(f"{passed} passed, {failed} failed, {left_out} not begun after {seconds:g} s")
    return failed == 0


def _inputs(dtype: str) -> list[torch.Tensor]:
    import torch

    from labsupport.profiling.timing import resolve_device

    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTHS[0], HEADS), (LENGTHS[1], KV_HEADS), (LENGTHS[1], KV_HEADS)]
    return [
        torch.randn(2, *shape, HEAD_DIM, generator=generator).to(
            resolve_device(None), getattr(torch, dtype)
        )
        for shape in shapes
    ]


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact output, and the gradient of its sum with respect to q, in float64."""
    import torch

    from labsupport.attention.reference import oracle_attention

    leaf = q.double().requires_grad_()
    group = HEADS // KV_HEADS
    keys, values = (x.double().repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    out = oracle_attention(leaf.transpose(1, 2), keys, values, causal=True)[0].transpose(1, 2)
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    return out.detach(), grad


def _too_slow(backend: str, q: torch.Tensor) -> bool:
    # On a CPU, FlexAttention's first call runs a C++ compiler for longer than the whole test takes.
    return backend == "flex" and q.device.type == "cpu"


if __name__ == "__main__":
    main()
