"""The exit status of a program that Control-C ended and that has tidied up."""

STATUS = 130
"""The exit status of a program that SIGINT ended: 128 and the signal's number."""


def interrupted_status() -> int:
    """`STATUS`, for a program that caught the KeyboardInterrupt and now ends by itself.

    CPython (3.8 to 3.13, tried) remembers an interrupt that strikes inside `exec` of a text, even
    if it is caught; dataclasses are made with such a call, so that many an import can be struck.
    Started as `python -m`, the program would then kill itself with SIGINT at its end, whatever
    its status. Another `exec` of a text makes CPython forget.
    """
    exec("")
    return STATUS
