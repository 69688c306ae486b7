"""Hostile submissions that stop, kill, fill or block: mostly accidents, now and then meant.

What is broken is the first exercise; the others are solved, and must get their points. Whatever
could hurt the machine is bounded: when a limit does not hold, the test fails and nothing else.
"""

from tests.grader.variants.course import Copy, Variants, solution

hostile = Variants(memory=3, softmax=4)

WRONG = "def textbook_attention(q, k, v, mask=None):\n    return v, v\n"


def in_the_call(work: Copy, *lines: str) -> None:
    """Solve all; the first exercise's function does this instead."""
    body = "\n".join(f"    {line}" for line in lines)
    work.solve().write("attention", f"def textbook_attention(q, k, v, mask=None):\n{body}\n")


def in_the_cell(work: Copy, source: str, function: str = WRONG) -> None:
    """Solve all; the first exercise's cell does this, and defines a wrong function."""
    work.solve().write("attention", f"{source}\n\n\n{function}")


@hostile()
def infinite_loop(work: Copy) -> None:
    """A function that never returns."""
    in_the_call(work, "while True:", "    pass")


@hostile()
def infinite_loop_while_defining(work: Copy) -> None:
    """The cell itself never ends."""
    in_the_cell(work, "while True:\n    pass")


@hostile()
def loop_that_catches_everything(work: Copy) -> None:
    """An interrupt is an exception, and this loop swallows all of them."""
    in_the_call(work, "while True:", "    try:", "        while True:", "            pass")
    work.cell("attention").source += "        except BaseException:\n            pass\n"


@hostile()
def loop_in_c_that_keeps_the_interpreter(work: Copy) -> None:
    """A regular expression that takes years and never lets another thread of Python run."""
    in_the_cell(work, "import re\n\nre.match(r'(a+)+$', 'a' * 60 + 'b')")


@hostile()
def sleeps_and_ignores_signals(work: Copy) -> None:
    """Deaf to polite requests to end."""
    lines = "import signal, time\n\nfor number in (1, 2, 15, 14):\n"
    in_the_cell(work, f"{lines}    signal.signal(number, signal.SIG_IGN)\ntime.sleep(100_000)")


@hostile()
def stops_itself(work: Copy) -> None:
    """SIGSTOP: the kernel neither lives nor dies."""
    in_the_cell(work, "import os, signal\n\nos.kill(os.getpid(), signal.SIGSTOP)")


@hostile()
def stops_its_parent(work: Copy) -> None:
    """SIGSTOP to what started the kernel."""
    in_the_cell(work, "import os, signal\n\nos.kill(os.getppid(), signal.SIGSTOP)")


@hostile()
def kills_its_parent(work: Copy) -> None:
    """SIGKILL to what started the kernel."""
    in_the_cell(work, "import os, signal\n\nos.kill(os.getppid(), signal.SIGKILL)")


@hostile()
def kills_its_process_group(work: Copy) -> None:
    """SIGKILL to everybody in the group."""
    in_the_cell(work, "import os, signal\n\nos.killpg(0, signal.SIGKILL)")


@hostile()
def kills_itself(work: Copy) -> None:
    """The kernel is gone in the middle of a call."""
    in_the_call(work, "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")


@hostile()
def leaves_at_once(work: Copy) -> None:
    """os._exit with a status that says that all is well."""
    in_the_call(work, "import os", "os._exit(0)")


@hostile()
def sys_exit_in_the_cell(work: Copy) -> None:
    """sys.exit is only an exception in a notebook; the solution below it is never reached."""
    in_the_cell(work, "import sys\n\nsys.exit(0)", solution("attention"))


@hostile()
def sys_exit_in_the_call(work: Copy) -> None:
    """sys.exit while a check waits for an answer."""
    in_the_call(work, "import sys", "sys.exit(0)")


@hostile()
def keyboard_interrupt(work: Copy) -> None:
    """Pretends that the instructor pressed Control-C."""
    in_the_call(work, "raise KeyboardInterrupt")


@hostile()
def shuts_the_kernel_down(work: Copy) -> None:
    """Asks Jupyter itself to end."""
    in_the_cell(work, "get_ipython().kernel.do_shutdown(restart=False)\nget_ipython().ask_exit()")


@hostile()
def segmentation_fault(work: Copy) -> None:
    """Reads address 0."""
    in_the_call(work, "import ctypes", "return ctypes.string_at(0)")


@hostile()
def bottomless_recursion(work: Copy) -> None:
    """Recursion with Python's limit taken away."""
    in_the_cell(work, "import sys\n\nsys.setrecursionlimit(10**9)")
    work.cell("attention").source += "\n\ntextbook_attention = lambda *a: textbook_attention(*a)"


@hostile()
def memory_bomb(work: Copy) -> None:
    """6 GB, a piece at a time, each page touched."""
    in_the_call(work, "kept = []", "for _ in range(96):", "    kept.append(b'x' * 2**26)")


@hostile()
def memory_bomb_in_a_child(work: Copy) -> None:
    """The same, spread over processes: each is small, together they are not."""
    in_the_call(
        work,
        "import os, time",
        "for _ in range(8):",
        "    if os.fork() == 0:",
        "        kept = b'x' * (600 * 2**20)",
        "        time.sleep(60)",
        "        os._exit(0)",
        "time.sleep(60)",
    )


@hostile()
def fork_bomb(work: Copy) -> None:
    """Bounded at 400 processes, which sleep."""
    source = (
        "import os, time\n\nfor _ in range(400):\n    if os.fork() == 0:\n"
        "        os.setsid()\n        time.sleep(120)\n        os._exit(0)\ntime.sleep(120)"
    )
    in_the_cell(work, source)


@hostile()
def two_thousand_threads(work: Copy) -> None:
    """Threads that sleep and are no daemons, so that Python waits for them at its end."""
    source = (
        "import threading, time\n\nfor _ in range(2000):\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()"
    )
    in_the_cell(work, source)


@hostile(attention=4)
def thread_that_keeps_running(work: Copy) -> None:
    """A right solution beside a busy thread: it has its points, and the process ends."""
    source = (
        "import threading, time\n\n\ndef busy():\n    while True:\n        time.sleep(0.001)\n\n\n"
        "threading.Thread(target=busy).start()"
    )
    in_the_cell(work, source, solution("attention"))


@hostile(attention=4)
def exit_handler_that_hangs(work: Copy) -> None:
    """A right solution; at the end of the process a handler sleeps for a day."""
    source = "import atexit, time\n\natexit.register(time.sleep, 86_400)"
    in_the_cell(work, source, solution("attention"))


@hostile()
def alarm_in_the_middle(work: Copy) -> None:
    """A signal handler that raises an exception wherever the program happens to be."""
    source = (
        "import signal\n\n\ndef rudely(*_):\n    raise ZeroDivisionError('an alarm')\n\n\n"
        "signal.signal(signal.SIGALRM, rudely)\nsignal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)"
    )
    # Which of the other exercises are hit is a matter of luck: run apart, they are not.
    in_the_cell(work, source, "def textbook_attention(q, k, v, mask=None):\n    while True: pass\n")


@hostile()
def giant_output(work: Copy) -> None:
    """Prints 400 MB, in the cell."""
    in_the_cell(work, "for _ in range(400):\n    print('x' * 2**20)")


@hostile()
def giant_output_in_the_call(work: Copy) -> None:
    """Prints 400 MB past Python's sys.stdout."""
    in_the_call(work, "import os", "for _ in range(400):", "    os.write(1, b'x' * 2**20)")


@hostile()
def giant_error_message(work: Copy) -> None:
    """An exception whose message has 200 MB."""
    in_the_call(work, "raise ValueError('x' * 200_000_000)")


@hostile()
def error_that_cannot_be_printed(work: Copy) -> None:
    """An exception whose __str__ never ends, and whose class has a strange name."""
    source = (
        "class Error(Exception):\n    def __str__(self):\n        while True: pass\n\n"
        "    __repr__ = __str__\n\n\nError.__name__ = '<script>' * 1000"
    )
    in_the_cell(work, source, "def textbook_attention(q, k, v, mask=None):\n    raise Error\n")


@hostile()
def waits_for_input(work: Copy) -> None:
    """input() in a place where nobody types."""
    in_the_call(work, "return input('Which answer would you like?')")


@hostile()
def breakpoint_left_behind(work: Copy) -> None:
    """The debugger waits for a command."""
    in_the_cell(work, "breakpoint()")


@hostile()
def deletes_its_folder(work: Copy) -> None:
    """The working directory is gone."""
    in_the_cell(work, "import os, shutil\n\nshutil.rmtree(os.getcwd(), ignore_errors=True)")


@hostile()
def locked_folders(work: Copy) -> None:
    """Folders with mode 000 that somebody has to clear away."""
    source = (
        "import os, pathlib\n\nfor n in range(3):\n    p = pathlib.Path(f'locked{n}/inner')\n"
        "    p.mkdir(parents=True)\n    (p / 'file').touch()\n    os.chmod(p, 0)\n"
        "    os.chmod(p.parent, 0)"
    )
    in_the_cell(work, source)


@hostile()
def fills_the_disk(work: Copy) -> None:
    """2 GB in files of 50 MB, in every folder that can be written."""
    source = (
        "import os, tempfile\n\nfor n in range(20):\n"
        "    for d in (os.getcwd(), tempfile.gettempdir(), os.path.expanduser('~')):\n"
        "        try:\n            with open(f'{d}/fill-7Q4-{n}', 'wb') as f:\n"
        "                f.write(b'x' * (50 * 2**20))\n        except OSError:\n            pass"
    )
    in_the_cell(work, source)


@hostile()
def many_small_files(work: Copy) -> None:
    """20,000 files in a chain of folders."""
    source = (
        "import os\n\nfor n in range(200):\n    os.mkdir('d')\n    os.chdir('d')\n"
        "    for k in range(100):\n        open(str(k), 'w').close()"
    )
    in_the_cell(work, source)


@hostile()
def closes_all_files(work: Copy) -> None:
    """Closes every descriptor, Jupyter's and the grader's too."""
    in_the_cell(work, "import os\n\nos.closerange(3, 4096)")


@hostile()
def compresses_for_an_hour(work: Copy) -> None:
    """Heavy work inside of PyTorch, outside of Python's reach."""
    in_the_call(work, "x = torch.rand(3000, 3000)", "for _ in range(100_000):", "    x = x @ x")
