"""Switching it on and off: for all clients, for one, or by `opentelemetry-instrument` at start-up."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pymongo
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined] # untyped there

from otel_retry.clients import ClientRegistry
from otel_retry.config import SettingError, Settings
from otel_retry.logs import forget_warnings, logger, warn_once
from otel_retry.pymongo.seam import Seam, UnknownShape, end_open_transactions, options_of, stop_listening
from otel_retry.pymongo.seam.listening import listen_to_pool_events
from otel_retry.telemetry.contrib import mute_contrib
from otel_retry.telemetry.hub import TelemetryHub, metrics_are_collected

if TYPE_CHECKING:
    from collections.abc import Collection

    from otel_retry.clients import ClientOptions, ClientState
    from otel_retry.pacing import TokenBucket
    from otel_retry.policy import RetryPolicy


def _equip(client: Any, state: ClientState, options: ClientOptions) -> None:
    """A client is seen for the first time: what it reports to, and what has to be heard from the start."""
    try:
        if state.settings.enabled:
            mute_contrib()
        state.telemetry = _hub.telemetry_for(state, traces_itself=options.traces_itself)
        if options.traces_itself:
            logger.info(
                "PyMongo's own tracing is on for client %s: otel_retry makes no spans for it", state.name
            )
        if (
            state.telemetry is not None
            and state.telemetry.instruments is not None
            and metrics_are_collected(state.settings.meter_provider)
        ):
            listen_to_pool_events(client, state, state.telemetry)
    except Exception:
        warn_once(
            "equip", "otel_retry failed to set up telemetry for a client; it goes without", exc_info=True
        )


_registry = ClientRegistry(options_of, _equip)
_hub = TelemetryHub(_registry.reporting)
_seam = Seam(_registry)
_switching = threading.RLock()
"""Held by whoever switches on or off: two at once would take each other's patches for PyMongo's own."""


def _after_fork() -> None:
    global _switching  # noqa: PLW0603 - another thread's hold on it would never end in the child
    _switching = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def instrument(policy: str | RetryPolicy | None = None, **options: Any) -> None:
    """Execute the operations of every MongoClient and AsyncMongoClient by `policy`, from now on, and report them.

    Clients that exist already are covered. A second call replaces the settings of the first, except for clients with
    settings of their own; a client's bucket starts full again. Raises `SettingError` for an option that cannot be, and nothing else.
    """
    switch_on(Settings.load({"policy": policy, **options}))


def instrument_client(client: Any, policy: str | RetryPolicy | None = None, **options: Any) -> None:
    """The same for one client, with settings of its own; works with and without `instrument()`."""
    settings = Settings.load({"policy": policy, **options})
    if not isinstance(client, (pymongo.MongoClient, pymongo.AsyncMongoClient)):
        raise SettingError(f"it takes a MongoClient or an AsyncMongoClient, not a {type(client).__name__}")
    with _switching:
        before = _registry.replace(client, settings)
        if before is not None:
            stop_listening(client, before)
        _install()


def uninstrument() -> None:
    """Put PyMongo back as it was found, for all clients. Operations under way end as they began."""
    with _switching:
        _seam.remove()
        for client, state in _registry.clear():
            stop_listening(client, state)
        end_open_transactions()


def state_of(client: Any) -> ClientState | None:
    """What is known of one client; None: it is not instrumented."""
    return _registry.of(client)


def budget(client: Any) -> TokenBucket | None:
    """The client's bucket: `tokens`, `capacity`. None where no bucket holds retries back."""
    state = _registry.of(client)
    return None if state is None else state.budget


def setup_otlp(service_name: str, *, policy: str | RetryPolicy | None = None, **options: Any) -> None:
    """For programs that do not start under `opentelemetry-instrument`: set up the SDK's providers with OTLP exporters
    by the standard OTEL_* variables, then `instrument()`. `service_name` counts where OTEL_SERVICE_NAME says nothing.

    Raises `SettingError` where providers are set already: then `instrument()` is the call to make.
    """
    from otel_retry import otlp  # noqa: PLC0415 - the SDK is loaded only for those who ask for it

    otlp.setup_otlp(service_name, policy=policy, **options)


def switch_on(settings: Settings) -> None:
    """What `instrument` does once its settings are known."""
    with _switching:
        forget_warnings()
        if settings.enabled:
            mute_contrib()
        for client, state in _registry.use(settings):
            stop_listening(client, state)
        _install()


def _install() -> None:
    try:
        _seam.install()
    except UnknownShape as found:
        logger.warning(
            "otel_retry does not know PyMongo %s: %s. PyMongo's own retries stay in place (as with policy 'driver'); "
            "please report this version",
            pymongo.version,
            found,
        )
    except Exception:
        logger.warning(
            "otel_retry could not be installed into PyMongo %s, whose own retries stay in place; please report this",
            pymongo.version,
            exc_info=True,
        )


class OtelRetryInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """What `opentelemetry-instrument` finds by its entry point. Nobody is there to catch an error at start-up, so a
    wrong setting is logged and its default holds.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("pymongo >= 4.9, < 5",)

    def _instrument(self, **kwargs: Any) -> None:
        known = {name: value for name, value in kwargs.items() if name not in _DISTRO_OPTIONS}
        switch_on(Settings.load(known, forgiving=True))

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002
        uninstrument()


# What the distro and BaseInstrumentor pass along for their own use.
_DISTRO_OPTIONS = frozenset({"skip_dep_check", "raise_exception_on_conflict", "exclude_urls"})
