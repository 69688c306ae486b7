"""Hostile submissions that answer the grader themselves, and that hide from its measurements.

The grader talks with the student's process through a socket. Here the process says what it likes:
the first exercise attacks and is not solved. The others are solved, and deserve their points where
the attack leaves the process able to give its answers.
"""

from tests.grader.variants.course import Copy, Variants
from tests.grader.variants.hostile_breaking import in_the_cell
from tests.grader.variants.hostile_lies import STUB

hostile = Variants(memory=3, softmax=4)

_WORKER = "import grader.handover.worker as w\n"
_CODEC = _WORKER + "from grader.handover.wire import receive, send\n"


@hostile()
def serve_replaced(work: Copy) -> None:
    """Our own loop: to every request the answer "passed", in all shapes that might count."""
    in_the_cell(
        work,
        f"{_CODEC}import socket\n\n\n"
        "def serve(namespace, path):\n"
        "    if 'score_bytes' in namespace or 'running_max_and_sum' in namespace:\n"
        "        return honest(namespace, path)\n"
        "    with socket.socket(socket.AF_UNIX) as s:\n        s.connect(path)\n"
        "        for number in range(1, 100):\n            receive(s, limit=2**30)\n"
        "            send(s, w.encode({'id': number, 'value': {'textbook_attention': {'kind': "
        "'function', 'name': 'x'}}, 'status': 'passed', 'points': 100, 'passed': True}))\n\n\n"
        "honest, w.serve = w.serve, serve",
        STUB,
    )


@hostile()
def inputs_changed_in_the_grader(work: Copy) -> None:
    """Says that the function set its arguments to 0: of zeros, zeros are the right answer."""
    in_the_cell(
        work,
        f"{_WORKER}\n\ndef compute(self, request, function):\n"
        "    args = request['args']\n"
        "    if request['target'] != 'textbook_attention':\n"
        "        return honest(self, request, function)\n"
        "    q, k, v = (a * 0 for a in args[:3])\n"
        "    weights = torch.full((*q.shape[:-1], k.shape[-2]), 1 / k.shape[-2], dtype=q.dtype)\n"
        "    changed = ((q, k, v, *args[3:]), {})\n"
        "    return w.encode({'id': request['id'], 'value': (q, weights), 'graph': None, "
        "'changed': changed})\n\n\n"
        "honest, w._Worker.compute = w._Worker.compute, compute",
    )


def _sends(name: str, frame: str, why: str, then: str = "") -> None:
    """Answers the first exercise's calls with these bytes."""

    def build(work: Copy) -> None:
        in_the_cell(
            work,
            f"{_WORKER}import json, os, struct, time\n\n\n"
            "def header(text, size=0):\n"
            "    start = b'LH1\\n' + struct.pack('>II', len(text), size)\n"
            "    return start + text + bytes(-(len(start) + len(text)) % 64)\n\n\n"
            "def compute(self, request, function):\n"
            "    if request['target'] != 'textbook_attention':\n"
            "        return honest(self, request, function)\n"
            f"    connection, number = self.connection, request['id']\n{then}"
            f"    return {frame}\n\n\n"
            "honest, w._Worker.compute = w._Worker.compute, compute",
        )

    build.__name__, build.__doc__ = name, why
    hostile()(build)


_VALUE = "w.encode({'id': number, 'value': (1, 1), 'changed': None, 'graph': None})"
_NODE = (
    "json.dumps(['dict', {'id': ['int', number], 'value': ['tensor', ['float32', [2**20, 2**20], "
    "0, False]]}]).encode()"
)
_sends("sends_garbage", "[os.urandom(4096)]", "Random bytes.")
_sends("sends_a_huge_length", "[b'LH1\\n' + b'\\xff' * 8]", "A frame that claims 4 GB.")
_sends("sends_a_false_length", f"[header({_NODE}, 2**31)]", "A tensor that claims 4 TB.")
_sends("sends_deep_json", "[header(b'[' * 10**6)]", "A header that is brackets only.")
_sends("sends_other_json", '[header(b\'{"status": "passed"}\')]', "A header of another kind.")
_sends("sends_a_pickle", "[__import__('pickle').dumps((1, 2))]", "Not the format that was agreed.")
_sends("sends_http", "[b'HTTP/1.1 200 OK\\r\\n\\r\\n{}']", "Another protocol.")
_sends("answers_twice", f"{_VALUE} * 2", "Two answers to one question.")
_sends(
    "answers_another_question",
    "w.encode({'id': number + 1, 'value': (1, 1), 'changed': None, 'graph': None})",
    "An answer to the question that would come next.",
)
_sends(
    "asks_instead", "w.encode({'next': 0})", "Asks the grader for a stream that it did not offer."
)
_sends(
    "asks_for_ever",
    "w.encode({'next': 0})",
    "A thousand such requests, unasked.",
    "    for _ in range(1000):\n        connection.sendall(b''.join(w.encode({'next': 0})))\n",
)
_sends(
    "half_an_answer",
    "[]",
    "Begins to answer, and falls silent.",
    "    connection.sendall(b'LH1\\n\\0\\0')\n    time.sleep(10_000)\n",
)
_sends(
    "drips_an_answer",
    "[]",
    "A byte every half second, for ever: no single wait is long.",
    "    connection.sendall(b'LH1\\n' + struct.pack('>II', 2**20, 0))\n"
    "    while True:\n        connection.sendall(b' ')\n        time.sleep(0.5)\n",
)
_sends("closes_the_connection", "[]", "Hangs up.", "    connection.close()\n")
_sends(
    "floods_the_connection",
    "[]",
    "A gigabyte that nobody asked for.",
    "    for _ in range(1024):\n        connection.sendall(b'x' * 2**20)\n",
)
_sends(
    "lets_a_child_answer",
    _VALUE,
    "A forked process answers, and so does its parent.",
    "    os.fork()\n",
)
_sends(
    "raises_strange_classes",
    "w.encode({'id': number, 'error': [[['SystemExit', 'BaseException'], 'x'], [['\\0'], '']]})",
    "Exceptions that the grader must not raise in earnest.",
)
_sends(
    "raises_groups",
    "w.encode({'id': number, 'error': [[['ExceptionGroup', 'Exception'], 'x']] * 3})",
    "Exceptions that cannot be made without arguments.",
)


@hostile()
def connects_too_early(work: Copy) -> None:
    """Finds the socket's path in its own notebook, takes every connection, and says nothing."""
    in_the_cell(
        work,
        "import glob, re, socket\n\nkept = []\nfor name in glob.glob('*.ipynb'):\n"
        "    for path in set(re.findall(r'/[\\w/.-]+\\.sock\\w*', open(name).read())):\n"
        "        try:\n            s = socket.socket(socket.AF_UNIX)\n            s.connect(path)\n"
        "            kept.append(s)\n        except OSError:\n            pass",
    )


@hostile()
def removes_the_socket(work: Copy) -> None:
    """Deletes whatever looks like the grader's socket."""
    in_the_cell(
        work,
        "import glob, os, re\n\nfor name in glob.glob('*.ipynb'):\n"
        "    for path in set(re.findall(r'/[\\w/.-]+\\.sock\\w*', open(name).read())):\n"
        "        try:\n            os.unlink(path)\n        except OSError:\n            pass",
    )


def _hides(name: str, before: str, why: str, *, at_top: str = "") -> None:
    """The tiled forward, right but for the whole matrix, which is hidden from the memory check."""

    def build(work: Copy) -> None:
        line = "    out = torch.zeros_like(q)"
        work.solve().change("tiled", (line, f"{before}\n{line}"))
        work.write("tiled", f"{at_top}{work.cell('tiled').source}")

    build.__name__, build.__doc__ = name, why
    hostile(notebook="02-Tiled", tiled=6)(build)


_hides(
    "matrix_with_its_traces_removed",
    "    scores = q @ k.mT\n    del scores\n    for what in '51':\n"
    "        with open('/proc/self/clear_refs', 'w') as f:\n            f.write(what)",
    "The process resets the figure by which the system remembers its highest memory.",
)
_hides(
    "matrix_in_a_child",
    "    import os\n    torch.set_num_threads(1)\n    child = os.fork()\n    if child == 0:\n"
    "        s = torch.ones(seqlen_q, seqlen_k)\n        os._exit(0)\n    os.waitpid(child, 0)",
    "A process of its own holds the whole matrix for a moment.",
)
_hides(
    "matrix_made_beforehand",
    "    SPACE[: seqlen_q * seqlen_k].fill_(1.0)",
    "The memory was taken before the measurement, and is only filled again.",
    at_top="SPACE = torch.ones(8192 * 8192)\n\n\n",
)
