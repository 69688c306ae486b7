"""How one piece of a block is computed: the table of kernels, and the choice among them.

To add a kernel, write its forward and backward (`kernel.py` says what is asked of them), and add an
entry to `KERNELS`.
"""

from __future__ import annotations

from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.registry import AttentionCall, BackendUnavailableError
from labsupport.distributed.ring.kernel import BlockKernel
from labsupport.distributed.ring.kernels_fa4 import FA4
from labsupport.distributed.ring.kernels_lab import FLASH_TORCH, FLASH_TRITON
from labsupport.distributed.ring.kernels_torch import CUDNN, NATIVE

# In order of preference. On Hopper cuDNN is the fastest. Its gradients, like those of native,
# differ in the last bits from run to run; `deterministic=True` passes over both. On a CPU the lab's
# own comes first: its partial results are float32, and the processes of a lesson are small.
KERNELS: tuple[BlockKernel, ...] = (CUDNN, NATIVE, FLASH_TRITON, FLASH_TORCH, FA4)


def choose(
    name: str, call: AttentionCall, deterministic: bool
) -> tuple[BlockKernel, dict[str, tuple[str, ...]]]:
    """The kernel of that name, or the first that can for "auto"; and why not those before it.

    Raises:
        AttentionInputError: there is no such kernel.
        BackendUnavailableError: it cannot compute this call; says every reason.
    """
    names = [kernel.name for kernel in KERNELS]
    if name not in ("auto", *names):
        raise AttentionInputError(
            f"ring attention has no kernel {name!r}: there are auto, {', '.join(names)}."
        )
    refused: dict[str, tuple[str, ...]] = {}
    for kernel in KERNELS:
        if name not in ("auto", kernel.name):
            continue
        reasons = kernel.reasons(call, deterministic)
        if not reasons and (name != "auto" or kernel.in_auto(call.q.device)):
            return kernel, refused
        refused[kernel.name] = tuple(reasons) or ("runs, but only when asked for by name",)
    listing = "\n".join(f"  {other}: {'; '.join(why)}" for other, why in refused.items())
    able = [kernel.name for kernel in KERNELS if not kernel.reasons(call, deterministic)]
    raise BackendUnavailableError(
        f"kernel {name!r} cannot run this ring:\n{listing}\nKernels that can: "
        f"{', '.join(able) or 'none'}.",
        refused,
    )
