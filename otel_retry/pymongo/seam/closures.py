"""Looking into the callbacks that PyMongo hands over."""

from __future__ import annotations

from typing import Any


def closure(func: Any, name: str) -> Any:
    """A variable that PyMongo's callback closes over, or None."""
    code = getattr(func, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    try:
        return func.__closure__[code.co_freevars.index(name)].cell_contents
    except ValueError:  # not assigned yet
        return None


def entered(func: Any, error: BaseException) -> bool:
    """Whether `error` came out of `func`, that is, after a connection was there and a command may have been sent.

    Read off the traceback when something failed, so that an operation that succeeds pays nothing for it.
    """
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    if code is None:
        return True
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False
