"""A seccomp filter for the sandbox's process: it may start threads, but no programs.

So nobody works where attention is not refused and memory is not watched. It cannot be undone.
"""

import ctypes
import os
import platform
import struct

# By processor: its number for the kernel, and those of the calls seccomp, clone and clone3, and
# of what is refused: execve, execveat, memfd_create (room that no limit on files covers),
# unshare, add_key, request_key and keyctl (the user's keys), process_madvise, io_uring_setup, bpf,
# and, where they exist, fork and vfork.
_ALSO = (440, 425)
_MACHINES = {
    "x86_64": (
        *(0xC000003E, 317, 56, 435),
        (59, 322, 319, 272, 248, 249, 250, *_ALSO, 321, 57, 58),
    ),
    "aarch64": (0xC00000B7, 277, 220, 435, (221, 281, 279, 97, 217, 218, 219, *_ALSO, 280)),
}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # the errors EPERM and ENOSYS
_THREAD = 0x00010000  # CLONE_THREAD
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SET_FILTER, _ALL_THREADS = 1, 38, 1, 1


def forbid() -> None:
    """Forbid this process to start programs; end it with its parent; raise OSError if it can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PARENT_DEATH_SIGNAL, 9, 0, 0, 0)
    if platform.machine() not in _MACHINES:
        raise OSError(f"no filter is known for {platform.machine()}")
    machine, seccomp, clone, clone3, refused = _MACHINES[platform.machine()]
    # (instruction, lines to skip if true, if false, operand)
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_ANSWER, 0, 0, _REFUSE)]
    lines += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_ANSWER, 0, 0, _REFUSE)]
    # The C library then uses clone, whose flags can be read.
    lines += [(_EQUAL, 0, 1, clone3), (_ANSWER, 0, 0, _UNKNOWN)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _REFUSE)]
    lines += [(_EQUAL, 1, 0, clone), (_ANSWER, 0, 0, _ALLOW), (_LOAD, 0, 0, 16)]
    lines += [(_ANY_BIT, 1, 0, _THREAD), (_ANSWER, 0, 0, _REFUSE), (_ANSWER, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in lines))
    header = struct.pack("HP", len(lines), ctypes.addressof(program))
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    number = ctypes.c_long(seccomp)
    if libc.syscall(number, ctypes.c_long(_SET_FILTER), ctypes.c_long(_ALL_THREADS), header):
        raise OSError(ctypes.get_errno(), f"no filter: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    forbid()
