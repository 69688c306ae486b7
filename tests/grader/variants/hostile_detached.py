"""Hostile submissions whose work is done by a process that no longer descends from theirs.

The tiled forward is right in its values, and has its points but those for memory: the whole matrix
is made elsewhere.
"""

from tests.grader.variants.course import Copy, Variants

hostile = Variants(tiled=6)

_SERVED_BY_A_GRANDCHILD = """
_os = torch.os
_here, _there = torch.multiprocessing.Pipe()
def _full(q, k, v, is_causal):
    n, m = q.shape[-2], k.shape[-2]
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal: s = s.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1)
if _os.fork() == 0:
    if _os.fork() == 0:
        torch.set_num_threads(1)
        while True:
            q, k, v, c = _there.recv(); o, l = _full(*map(torch.tensor, (q, k, v)), c)
            _there.send((o.numpy(), l.numpy()))
    _os._exit(0)
_os.wait()
def my_flash_forward(q, k, v, is_causal, block_q, block_k):
    _here.send((q.numpy(), k.numpy(), v.numpy(), is_causal))
    return tuple(map(torch.from_numpy, _here.recv()))
"""


_FILLED_BY_A_GRANDCHILD = """
_os = torch.os
_here, _there = torch.multiprocessing.Pipe()
if _os.fork() == 0:
    if _os.fork() == 0:
        torch.set_num_threads(1)
        kept = torch.ones(8192 * 8192)
        while True:
            kept[: _there.recv()].fill_(1)
            _there.send(None)
    _os._exit(0)
_os.wait()
"""


@hostile(notebook="02-Tiled")
def matrix_in_a_detached_process(work: Copy) -> None:
    """Its parent ended at once, so that the system gave it another one."""
    work.write("tiled", _SERVED_BY_A_GRANDCHILD)


@hostile(notebook="02-Tiled")
def matrix_kept_by_a_detached_process(work: Copy) -> None:
    """The memory was taken before the measurement, and is only filled again."""
    line = "    out = torch.zeros_like(q)"
    asks = "    _here.send(seqlen_q * seqlen_k)\n    _here.recv()"
    work.solve().change("tiled", (line, f"{asks}\n{line}"))
    work.write("tiled", f"{_FILLED_BY_A_GRANDCHILD}\n\n{work.cell('tiled').source}")
