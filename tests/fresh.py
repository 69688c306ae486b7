"""Python processes that start at once: a server imports PyTorch and the lab, then forks.

`python -c "import torch"` takes seconds; a fork of a process that has imported it, and has done
nothing else, takes milliseconds. Not for tests about imports, memory, or environment variables
that are read at import: those start `sys.executable`.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType


class Python:
    """The server's client; the fixture `python` in conftest.py holds one."""

    def __init__(self):
        ours, theirs = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._pipe = ours

    def close(self):
        self._pipe.close()
        self._server.wait()

    def start(self, *arguments, cwd=None, env=None):
        """A running `python *arguments`; `env` replaces the environment, as in subprocess."""
        folder = Path(tempfile.mkdtemp())
        arguments = [str(argument) for argument in arguments]
        self._pipe.send((arguments, str(cwd or os.getcwd()), dict(env or os.environ), str(folder)))
        return Process(self, ["python", *arguments], self._pipe.recv(), folder)

    def __call__(self, *arguments, cwd=None, env=None, timeout=60, check=False):
        """`subprocess.run(["python", *arguments], capture_output=True, text=True, ...)`."""
        done = self.start(*arguments, cwd=cwd, env=env).finish(timeout)
        if check:
            assert done.returncode == 0, f"{done.args} ended with {done.returncode}: {done.stderr}"
        return done


class Process:
    """A process of the server's; `folder` holds its growing `stdout` and `stderr`."""

    def __init__(self, server, args, pid, folder):
        self._server, self.args, self.pid, self.folder = server, args, pid, folder

    def read(self, name="stdout"):
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def send_signal(self, number):
        os.kill(self.pid, number)

    def finish(self, timeout=60):
        """Wait for the end; return what `subprocess.run` returns."""
        ask, end = self._server._pipe, time.monotonic() + timeout
        while True:
            ask.send(self.pid)
            if (code := ask.recv()) is not None:
                return subprocess.CompletedProcess(
                    self.args, code, self.read(), self.read("stderr")
                )
            if time.monotonic() > end:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.args, timeout, self.read())
            time.sleep(0.02)


def wait_for(condition, seconds=60):
    """Return once the condition holds; fail if it takes too long."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def serve(pipe):
    """Fork for each request. In the child, return what it is to run; the parent never returns."""
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            sys.exit()
        if isinstance(request, int):
            process, status = os.waitpid(request, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if process else None)
            continue
        if (child := os.fork()) == 0:
            pipe.close()
            return request
        pipe.send(child)


def become(arguments, cwd, env, folder):
    """Take over what `python *arguments` would find: folder, environment, output, sys.argv."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(folder, name), "wb", buffering=0) as file:
            os.dup2(file.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *rest = arguments
    if kind in ("-c", "-m"):
        sys.path[0] = cwd
        sys.argv = [kind, *rest[1:]]
        if kind == "-m":
            sys.modules.pop(rest[0], None)  # it is about to run, not to be imported
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    # Nothing here may compute: a fork would not have the threads that PyTorch starts for it.
    # labsupport.attention comes before whatever imports Triton.
    # An optimizer's first step imports torch._dynamo: a second in each fork.
    for name in ("labsupport.attention", "labsupport.cli", "pandas", "transformers"):
        import_module(name)
    import_module("torch._dynamo")
    gc.freeze()  # a collection in a fork would copy what it shares
    request = serve(Connection(int(sys.argv[1])))
    try:
        become(*request)
        status = 0
    except SystemExit as error:
        status = error.code or 0
        if isinstance(status, str):
            raise
    # The interpreter's own end would copy as well, object by object: a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
