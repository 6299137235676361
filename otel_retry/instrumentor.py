"""Switching it on and off: for all clients, or for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_retry.clients import ClientRegistry
from otel_retry.config import Settings
from otel_retry.logs import forget_warnings, logger
from otel_retry.pymongo.seam import Seam, UnknownShape, options_of

if TYPE_CHECKING:
    from otel_retry.pacing import TokenBucket
    from otel_retry.policy import RetryPolicy

_registry = ClientRegistry(options_of)
_seam = Seam(_registry)


def instrument(policy: str | RetryPolicy | None = None, **options: Any) -> None:
    """Execute the operations of every MongoClient and AsyncMongoClient by `policy`, from now on.

    Clients that exist already are covered. A second call replaces the settings of the first; a client's bucket
    starts full again. Raises `SettingError` for an option that cannot be, and nothing else.
    """
    settings = Settings.load({"policy": policy, **options})
    forget_warnings()
    _registry.clear()
    _registry.use(settings)
    _install()


def instrument_client(client: Any, policy: str | RetryPolicy | None = None, **options: Any) -> None:
    """The same for one client, with settings of its own; works with and without `instrument()`."""
    _registry.replace(client, Settings.load({"policy": policy, **options}))
    _install()


def uninstrument() -> None:
    """Put PyMongo back as it was found, for all clients. Operations under way end as they began."""
    _seam.remove()
    _registry.clear()


def budget(client: Any) -> TokenBucket | None:
    """The client's bucket: `tokens`, `capacity`. None where no bucket holds retries back."""
    state = _registry.of(client)
    return None if state is None else state.budget


def _install() -> None:
    try:
        _seam.install()
    except UnknownShape as found:
        import pymongo  # noqa: PLC0415

        logger.warning(
            "otel_retry does not know PyMongo %s: %s. PyMongo's own retries stay in place (as with policy 'driver'); "
            "please report this version",
            pymongo.version,
            found,
        )
