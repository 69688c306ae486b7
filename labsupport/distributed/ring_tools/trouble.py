"""What went wrong, and what helps: from an error's text to the next thing to try."""

from __future__ import annotations

# (what the error says, what helps); the first that fits is given.
ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("outofmemoryerror", "out of memory"),
        "Out of memory: fewer tokens per rank (--seqlen), or more ranks. The buffers of a ring are "
        "twice K and V, and twice dK and dV in float32.",
    ),
    (
        ("outofresources", "out of resource"),
        "A Triton kernel asks for more shared memory than this GPU has: python -m "
        "benchmarks tune finds tilings that fit; or another --kernel.",
    ),
    (
        ("compilationerror", "ptxas", "passmanager", "triton error"),
        "Triton did not compile a kernel. Try it on one GPU first: python -m "
        "benchmarks resources. An old cache may be in the way: delete "
        "~/.triton/cache. Another --kernel shows whether the ring itself works.",
    ),
    (
        ("address already in use", "eaddrinuse"),
        "Another program has the port: torchrun --master-port 29501, or --standalone on one node.",
    ),
    (
        ("init_process_group", "rendezvous", "connection refused", "distnetwork", "tcpstore"),
        "The processes did not find each other. On all nodes the same --nnodes, --rdzv-backend "
        "c10d and --rdzv-endpoint HOST:PORT; the port must be open between them. With several "
        "network interfaces say which: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
    ),
    (
        ("timed out", "timeout"),
        "A rank waited in vain for another: look at the first rank that failed, not at those that "
        "waited. torchrun --log-dir logs --redirects 3 keeps what each rank said.",
    ),
    (
        ("nccl",),
        "NCCL failed. NCCL_DEBUG=INFO says where; one process a GPU is a must; NCCL_P2P_DISABLE=1 "
        "tells a bad link between GPUs from other causes.",
    ),
)

LARGE_ERRORS = (
    "Large errors mean that blocks are put together wrongly, or that a kernel is wrong on this "
    "GPU. If every kernel fails, suspect the messages (--kernel flash_torch, which is plain "
    "PyTorch); if one fails, suspect it: python -m labsupport.profiling.accuracy tries it on one "
    "device. Errors of about 1e-3 in bfloat16 are rounding, not a fault."
)


def advice(text: str) -> str | None:
    """What helps against an error with this text, if it is known."""
    low = text.lower()
    for signs, remedy in ADVICE:
        if any(sign in low for sign in signs):
            return remedy
    return None
