"""The three scenes: calm, an overload wave, a failover. Each is played against the real replica set."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_retry.mongod import MongodError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_retry.mongod import Deployment

_SHOP_COMMANDS = ["insert", "update", "find", "aggregate"]
_OVERLOAD: dict[str, Any] = {"errorCode": 462, "errorLabels": ["SystemOverloadedError", "RetryableError"]}
_SHARE_REJECTED = 0.35


@dataclass(frozen=True, slots=True)
class Scene:
    """`play` is a generator: it is asked to go on at the beginning, while it lasts if it is `lasting`, and at the end."""

    name: str
    text: str
    play: Callable[[Deployment, float], Iterator[None]]
    lasting: bool = False
    """Something happens in the middle of it too, not only at its beginning and end."""


def _calm(deployment: Deployment, seconds: float) -> Iterator[None]:  # noqa: ARG001
    yield


def _overload(deployment: Deployment, seconds: float) -> Iterator[None]:  # noqa: ARG001
    """A share of the commands is rejected, as a server's rate limiter does it."""
    point = deployment.fail_command(
        "all", commands=_SHOP_COMMANDS, probability=_SHARE_REJECTED, appName="shop", **_OVERLOAD
    )
    yield
    point.off()


def _failover(deployment: Deployment, seconds: float) -> Iterator[None]:
    """The primary steps down; its successor is killed; everything comes back."""
    deployment.step_down(seconds=5)
    half = time.monotonic() + seconds / 2
    while time.monotonic() < half:
        yield
    with suppress(MongodError):  # between two primaries: a failover is being shown already
        deployment.primary().kill()
    yield


SCENES = (
    Scene("calm", "nothing is wrong", _calm),
    Scene(
        "overload", f"{_SHARE_REJECTED:.0%} of the commands are rejected with the overload labels", _overload
    ),
    Scene("failover", "the primary steps down, then its successor is killed", _failover, lasting=True),
)


@contextmanager
def healed(deployment: Deployment) -> Iterator[None]:
    """Whatever a scene has done is undone."""
    try:
        yield
    finally:
        deployment.heal()
