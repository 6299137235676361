"""What spans may say of an error. Server messages quote documents, so unless raw text was asked for they stay out:
the type, the code and where it was raised are enough to find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pymongo.errors import ConnectionFailure, NotPrimaryError

from otel_retry import semconv

LONGEST_MESSAGE = 1024
LONGEST_STACK = 8192
_LONGEST_CODE_NAME = 64
_MOST_FRAMES = 20


def error_type(error: BaseException) -> str:
    return type(error).__name__


def code_of(details: Any) -> int | None:
    """The server's code for an error. Servers number them in 32 bits; anything else is none."""
    code = details.get("code") if isinstance(details, Mapping) else None
    if isinstance(code, bool) or not isinstance(code, int):
        return None
    return code if -(2**31) <= code < 2**31 else None


def message_of(error: BaseException, *, raw: bool) -> str:
    if raw:
        return str(error)[:LONGEST_MESSAGE]
    details = getattr(error, "details", None)
    if isinstance(details, Mapping):
        name = details.get("codeName")
        code = code_of(details)
        said = name[:_LONGEST_CODE_NAME] if isinstance(name, str) and name.isalnum() else error_type(error)
        return said if code is None else f"{said} (code {code})"
    if isinstance(error, ConnectionFailure) and not isinstance(error, NotPrimaryError):
        return str(error)[:LONGEST_MESSAGE]  # host, port and timeouts
    return error_type(error)


def _stack(error: BaseException) -> str:
    """The innermost frames as a traceback writes them, without lines of source: those cost a stat() of each file and
    may quote values.
    """
    frames: deque[str] = deque(maxlen=_MOST_FRAMES)
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(f'  File "{code.co_filename}", line {traceback.tb_lineno}, in {code.co_name}\n')
        traceback = traceback.tb_next
    return "".join(frames)


def exception_attributes(error: BaseException, *, raw: bool) -> dict[str, Any]:
    """MongoDB's specification wants these on the span itself; the exception event has the same."""
    message = message_of(error, raw=raw)
    stack = _stack(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return {
        semconv.EXCEPTION_TYPE: kind,
        semconv.EXCEPTION_MESSAGE: message,
        semconv.EXCEPTION_STACKTRACE: f"Traceback (most recent call last):\n{stack}{kind}: {message}"[
            -LONGEST_STACK:
        ],
    }
