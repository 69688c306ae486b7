"""The grader's end of a session: gradients, views, changed arguments; and a hostile other end."""

import socket
import struct
import sys
import threading
import time

import pytest
import torch

from grader.handover.codec import MAGIC, decode, encode
from grader.handover.remote import Session, SessionDied, SessionTimeout
from grader.handover.wire import receive
from tests.grader.handover.kernels import students

if sys.platform != "linux":
    pytest.skip("grading needs Linux", allow_module_level=True)

SOURCE = """
import torch
def double(x): return x * 2
def same_and_part(x): return x, x[1:, ::2]
def spoil(x, items, table):
    x.mul_(0); items.append(1); table["new"] = 1
    return 1
def fails(): raise FileNotFoundError("no such thing")
class Own(ValueError): pass
def fails_in_its_own_way():
    try: 1 / 0
    except ZeroDivisionError as error: raise Own("mine") from error
def total(parts): return sum(float(part.sum()) for part in parts)
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x); return x ** 3
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g, None
class Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): raise NotImplementedError
"""


@pytest.fixture(scope="module")
def session():
    with students(SOURCE) as sessions:
        yield next(sessions)


def test_gradients_go_through_a_function_and_a_function_class(session):
    x = torch.arange(3.0, requires_grad=True)
    session.remote("double")(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    cube = session.remote("Cube")
    assert issubclass(cube, torch.autograd.Function)
    (gradient,) = torch.autograd.grad(cube.apply(x, 1).sum(), [x])
    assert gradient.tolist() == [0, 3, 12]
    assert session.remote("double")(torch.ones(2)).grad_fn is None
    with torch.no_grad():
        assert session.remote("double")(x).grad_fn is None


def test_a_backward_that_is_not_written_says_so(session):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError):
        session.remote("Stub").apply(x).sum().backward()


def test_views_of_an_argument_are_views_of_the_graders_own(session):
    x = torch.randn(8, 6, 4)[:, 1:3].transpose(0, 1)
    same, part = session.remote("same_and_part")(x)
    for view, wanted in ((same, x), (part, x[1:, ::2])):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(view, wanted)


def test_arguments_that_were_changed_are_changed_here(session):
    import pandas as pd

    x, items, table = torch.ones(3), [], pd.DataFrame({"a": [1, 2]})
    assert session.remote("spoil")(x, items, table) == 1
    assert x.tolist() == [0, 0, 0]
    assert items == [1]
    assert list(table) == ["a", "new"]


def test_exceptions_have_their_names_and_are_what_they_derive_from(session):
    with pytest.raises(FileNotFoundError, match="no such thing"):
        session.remote("fails")()
    with pytest.raises(ValueError, match="mine") as caught:
        session.remote("fails_in_its_own_way")()
    assert type(caught.value).__name__ == "Own"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_iterator_is_asked_for_one_item_at_a_time(session):
    assert session.remote("total")(torch.ones(2) for _ in range(5)) == 10


def test_what_is_not_there_is_none(session):
    assert session.remote("nothing") is None


def hostile(answer, timeout_s=5.0):
    """A session whose other end answers each request with what `answer(request)` gives: bytes."""
    ours, theirs = socket.socketpair()

    def serve():
        with theirs:
            try:
                request = decode(receive(theirs, limit=2**20), resolve=lambda *node: None)
                for part in answer(request):
                    theirs.sendall(part)
                    time.sleep(0.05)
            except (OSError, EOFError):
                return

    threading.Thread(target=serve, daemon=True).start()
    return Session(ours, timeout_s)


def reply(value):
    return [bytes(part) for part in encode(value)]


ANSWERS = {
    "nothing": lambda request: [],
    "noise": lambda request: [b"\x00" * 1000],
    "a pickle": lambda request: [b"\x80\x04\x95\x1e\x00\x00\x00cos\nsystem\n."],
    "half a frame": lambda request: reply({"id": request["id"], "value": 1})[:1] and [MAGIC],
    "a header of 4 GB": lambda request: [MAGIC + struct.pack(">II", 2**32 - 1, 0)],
    "a body of 4 GB": lambda request: [MAGIC + struct.pack(">II", 2, 2**32 - 1)],
    "another request's answer": lambda request: reply({"id": request["id"] + 1, "value": 1}),
    "no number": lambda request: reply({"value": 1}),
    "true for 1": lambda request: reply({"id": True, "value": 1}),
    "no value": lambda request: reply({"id": request["id"]}),
    "no dict": lambda request: reply([1, 2]),
    "an error that is none": lambda request: reply({"id": request["id"], "error": 3}),
    "an error of nothing": lambda request: reply({"id": request["id"], "error": [[[], "x"]]}),
    "a stream that is none": lambda request: reply({"next": 0}),
    "a view of nothing": lambda request: [
        bytes(part)
        for part in encode(
            {"id": request["id"], "value": torch.ones(1)},
            refer=lambda kind, value: ["view", [5, [1], [1], 0]],
        )
    ],
    "arguments that were none": lambda request: reply(
        {"id": request["id"], "value": torch.ones(1, requires_grad=True), "graph": 1,
         "changed": (1, 2, 3), "next": None}
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(ANSWERS))
def test_an_answer_that_is_none_ends_the_session(what):
    session = hostile(ANSWERS[what])
    with pytest.raises(SessionDied):
        session.call("f", 1)
    assert isinstance(session.failure, SessionDied)
    with pytest.raises(SessionDied):
        session.call("f", 1)


def view(index, shape, stride, offset):
    def answer(request):
        frame = encode(
            {"id": request["id"], "value": torch.ones(1)},
            refer=lambda kind, value: ["view", [index, shape, stride, offset]],
        )
        return [bytes(part) for part in frame]

    return answer


@pytest.mark.parametrize(
    "given",
    [(0, [11], [1], 0), (0, [1], [1], 10), (0, [2], [10], 0), (0, [1], [1], -1),
     (-1, [2**39], [0], 0), (0, [2**39], [0], 0), (0, [1], [], 0), (7, [1], [1], 0),
     ("0", [1], [1], 0)],
)  # fmt: skip
def test_no_view_shows_more_than_the_argument(given):
    with pytest.raises(SessionDied):
        hostile(view(*given)).call("f", torch.arange(20.0)[5:15])


def test_who_answers_slowly_runs_out_of_time():
    def drip(request):
        for byte in reply({"id": request["id"], "value": 1})[0]:
            yield bytes([byte])

    start = time.monotonic()
    with pytest.raises(SessionTimeout):
        hostile(drip, timeout_s=0.5).call("f")
    assert time.monotonic() - start < 5


def test_who_asks_for_items_for_ever_runs_out_of_time():
    def ask(request):
        while True:
            yield b"".join(reply({"next": 0}))

    def forever():
        while True:
            yield 1

    with pytest.raises(SessionTimeout):
        hostile(ask, timeout_s=0.5).call("f", forever())


def test_an_exception_that_would_end_the_grader_becomes_an_ordinary_one():
    for name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "eval"):
        session = hostile(
            lambda request, name=name: reply({"id": request["id"], "error": [[[name], "no"]]})
        )
        with pytest.raises(RuntimeError, match="no"):
            session.call("f")
