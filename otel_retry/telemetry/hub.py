"""Gives each client its telemetry: tracers and instruments are made once for each provider and shared."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import get_meter_provider

from otel_retry.telemetry import Telemetry, make_meter, make_tracer
from otel_retry.telemetry.metrics import Instruments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from otel_retry.clients import ClientState
    from otel_retry.pacing import TokenBucket
    from otel_retry.telemetry.pools import Pool


class TelemetryHub:
    """`states` answers with all clients at the moment of collection."""

    def __init__(self, states: Callable[[], Iterable[ClientState]]) -> None:
        self._states = states
        self._instruments: weakref.WeakValueDictionary[int, Instruments] = weakref.WeakValueDictionary()
        """By the identity of their provider, which they keep. They live as long as it: its meter holds their callbacks."""

    def telemetry_for(self, state: ClientState, *, traces_itself: bool) -> Telemetry | None:
        settings = state.settings
        if not settings.enabled:
            return None
        return Telemetry(
            settings=settings,
            tracer=None if traces_itself else make_tracer(settings.tracer_provider),
            instruments=self._instruments_of(settings.meter_provider) if settings.metrics else None,
            collected=settings.metrics and metrics_are_collected(settings.meter_provider),
            policy=str(state.policy),
        )

    def _instruments_of(self, provider: Any) -> Instruments:
        """An instrument made twice on one meter is a warning and a wrong sum."""
        found = self._instruments.get(id(provider))
        if found is None:
            made: list[Instruments] = []
            instruments = Instruments(
                make_meter(provider),
                budgets=lambda: self._budgets(made),
                pools=lambda: self._pools(made),
            )
            made.append(instruments)
            instruments.provider = provider
            found = self._instruments[id(provider)] = instruments
        return found

    def _reporting_to(self, made: list[Instruments]) -> list[ClientState]:
        return [
            state
            for state in self._states()
            if state.telemetry is not None and any(state.telemetry.instruments is one for one in made)
        ]

    def _budgets(self, made: list[Instruments]) -> list[tuple[str, TokenBucket]]:
        return [(state.name, state.budget) for state in self._reporting_to(made) if state.budget is not None]

    def _pools(self, made: list[Instruments]) -> list[Pool]:
        return [
            pool
            for state in self._reporting_to(made)
            if state.pools is not None
            for pool in state.pools.pools()
        ]


def metrics_are_collected(provider: Any) -> bool:
    """Whether anybody would see a metric: the API's own meters drop them all, and a disabled SDK hands those out."""
    if provider is None:
        provider = get_meter_provider()
    if type(provider).__module__.startswith("opentelemetry.metrics"):
        return False  # not asked for a meter: until an SDK is set it keeps each one that it ever gave
    return not type(make_meter(provider)).__module__.startswith("opentelemetry.metrics")
