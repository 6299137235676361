"""The user's own hooks, with the signatures that opentelemetry-instrumentation-pymongo has: moving over is one line.

A hook that raises is logged, once, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_retry.logs import warn_once

if TYPE_CHECKING:
    from otel_retry.config import Settings

Hook = Callable[[Any, Any], None]
"""Called with the command's span and PyMongo's event."""


class Hooks:
    __slots__ = ("_failed", "_request", "_response")

    def __init__(
        self, *, request: Hook | None = None, response: Hook | None = None, failed: Hook | None = None
    ) -> None:
        self._request = request
        self._response = response
        self._failed = failed

    @classmethod
    def of(cls, settings: Settings) -> Hooks | None:
        """None: there are none."""
        given = (settings.request_hook, settings.response_hook, settings.failed_hook)
        if given == (None, None, None):
            return None
        request, response, failed = given
        return cls(request=request, response=response, failed=failed)

    def request(self, span: Any, event: Any) -> None:
        if self._request is not None:
            _call("request_hook", self._request, span, event)

    def response(self, span: Any, event: Any) -> None:
        if self._response is not None:
            _call("response_hook", self._response, span, event)

    def failed(self, span: Any, event: Any) -> None:
        if self._failed is not None:
            _call("failed_hook", self._failed, span, event)


def _call(name: str, hook: Hook, span: Any, event: Any) -> None:
    try:
        hook(span, event)
    except Exception:
        warn_once(f"hook: {name}", "%s raised; the command goes on without it", name, exc_info=True)
