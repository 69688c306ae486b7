"""What the processes print: rank 0's is shown as it comes, the others' last lines are kept."""

from __future__ import annotations

import codecs
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence

from labsupport.distributed.launch.processes import Worker

KEPT = 4_000  # bytes of each rank
_CHUNK = 2**16


class Output:
    """Reads what all processes print, so that none waits at a full pipe.

    Threads read; only `show`, called from the caller's thread, writes. So in a notebook the text
    appears under the cell that runs.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        # Bounded: a rank that prints faster than a notebook shows has to wait.
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue(maxsize=256)
        self._tails = {worker.rank: b"" for worker in workers}
        self._open = len(workers)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for worker in workers:
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        with worker.process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK):
                self._queue.put((worker.rank, chunk))
        self._queue.put((worker.rank, b""))

    def show(self, seconds: float) -> bool:
        """Show what comes within so many seconds; False, at once, if nothing more can come."""
        limit = time.monotonic() + seconds
        while self._open and (left := limit - time.monotonic()) > 0:
            try:
                rank, chunk = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if not chunk:
                self._open -= 1
                continue
            self._tails[rank] = (self._tails[rank] + chunk)[-KEPT:]
            if rank == 0:
                sys.stdout.write(self._decoder.decode(chunk))
                sys.stdout.flush()
        return self._open > 0

    def close(self) -> None:
        """Let the reading threads come to their end; what they still bring is dropped."""
        while self._open:
            try:
                self._open -= not self._queue.get(timeout=0.2)[1]
            except queue.Empty:  # something that a rank started holds its end of the pipe open
                return

    def tail(self, rank: int) -> str:
        """The last lines of a rank."""
        text = self._tails[rank].decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-15:])
