"""The grader's end of a session: gradients, views, changed arguments; and a hostile other end."""

import os
import socket
import struct
import sys
import threading
import time

import pandas as pd
import pytest
import torch

from grader.remote.session import Session, SessionDied, SessionTimeout
from grader.remote.values import pack, receive, unpack
from labsupport.checks import CheckFailed
from tests.grader.remote.kernels import students

if sys.platform != "linux":
    pytest.skip("grading needs Linux", allow_module_level=True)

SOURCE = """
import torch
def double(x): return x * 2
def spoil(x):
    if isinstance(x, torch.Tensor): x.mul_(0)
    elif isinstance(x, list): x.append(3)
    else: x["ms"] *= 2
    return 1
def fails(): raise FileNotFoundError("no such thing")
class Own(ValueError): pass
def fails_in_a_group(): raise ExceptionGroup("many", [ValueError("one"), KeyError("two")])
class Rude:
    def __getattr__(self, name): raise KeyError(name)
    def __call__(self, x): return x + 1
rude = Rude()
def fails_in_its_own_way():
    try: 1 / 0
    except ZeroDivisionError as error: raise Own("mine") from error
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


@pytest.mark.parametrize("given", [torch.ones(3), pd.DataFrame({"ms": [1.0, 2.0]}), [1, 2]])
def test_a_function_that_changes_its_argument_is_told(session, given):
    with pytest.raises(CheckFailed, match="spoil changed its argument number 1"):
        session.remote("spoil")(given)


def test_exceptions_have_their_names_and_are_what_they_derive_from(session):
    with pytest.raises(FileNotFoundError, match="no such thing"):
        session.remote("fails")()
    with pytest.raises(ValueError, match="mine") as caught:
        session.remote("fails_in_its_own_way")()
    assert type(caught.value).__name__ == "Own"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="many") as caught:
        session.remote("fails_in_a_group")()
    assert type(caught.value).__name__ == "ExceptionGroup"


def test_an_object_that_raises_at_any_attribute_can_be_called(session):
    assert session.remote("rude")(1) == 2
    assert session.remote("rude.nothing") is None


def test_what_is_not_there_is_none(session):
    assert session.remote("nothing") is None


def call(session, *args):
    return session.compute("call", "f", args, {})


def hostile(answer, timeout_s=5.0):
    """A session whose other end answers each request with what `answer(request)` gives: bytes."""
    ours, theirs = socket.socketpair()

    def serve():
        with theirs:
            try:
                request = unpack(receive(theirs, limit=2**20), resolve=lambda *node: None)
                for part in answer(request):
                    theirs.sendall(part)
                    time.sleep(0.05)
            except (OSError, EOFError):
                return

    threading.Thread(target=serve, daemon=True).start()
    return Session(ours, os.getpid(), timeout_s)


def reply(value, refer=None):
    header, body = pack(value, refer)
    return [struct.pack(">QQ", len(header), len(body)), header, body]


ANSWERS = {
    "nothing": lambda request: [],
    "noise": lambda request: [b"\x00" * 1000],
    "a pickle": lambda request: [b"\x80\x04\x95\x1e\x00\x00\x00cos\nsystem\n."],
    "half a frame": lambda request: reply({"id": request["id"], "value": 1})[:1],
    "a header of 4 GB": lambda request: [struct.pack(">QQ", 2**32, 0)],
    "a body of 4 GB": lambda request: [struct.pack(">QQ", 2, 2**32)],
    "another request's answer": lambda request: reply({"id": request["id"] + 1, "value": 1}),
    "no number": lambda request: reply({"value": 1}),
    "true for 1": lambda request: reply({"id": True, "value": 1}),
    "no value": lambda request: reply({"id": request["id"]}),
    "no dict": lambda request: reply([1, 2]),
    "an error that is none": lambda request: reply({"id": request["id"], "error": 3}),
    "an error of nothing": lambda request: reply({"id": request["id"], "error": [[[], "x"]]}),
    "a value of no known kind": lambda request: reply(
        {"id": request["id"], "value": 1j}, lambda _: ["view", 0]
    ),
}


@pytest.mark.parametrize("what", list(ANSWERS))
def test_an_answer_that_is_none_ends_the_session(what):
    session = hostile(ANSWERS[what])
    with pytest.raises(SessionDied):
        call(session, 1)
    assert isinstance(session.failure, SessionDied)
    with pytest.raises(SessionDied):
        call(session, 1)


def test_who_answers_slowly_runs_out_of_time():
    def drip(request):
        for byte in b"".join(reply({"id": request["id"], "value": 1})):
            yield bytes([byte])

    start = time.monotonic()
    with pytest.raises(SessionTimeout):
        call(hostile(drip, timeout_s=0.5))
    assert time.monotonic() - start < 5


def test_an_exception_that_would_end_the_grader_becomes_an_ordinary_one():
    for name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "eval"):
        session = hostile(
            lambda request, name=name: reply({"id": request["id"], "error": [[[name], "no"]]})
        )
        with pytest.raises(RuntimeError, match="no"):
            call(session)
