"""Settings: the one parser for keyword arguments and environment variables, and the only reader of the latter.

A wrong value is an error that names the setting, what it got and what it takes. Under auto-instrumentation nobody
is there to catch it: it is logged, and the default holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from otel_retry.logs import logger
from otel_retry.policies import POLICIES, BackpressurePolicy
from otel_retry.policy import RULES, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class SettingError(ValueError):
    """A setting has a value that it cannot take. The message says which, what, and what is possible."""


def parse_policy(value: object) -> RetryPolicy:
    """A policy's name, or an instance of RetryPolicy."""
    if isinstance(value, RetryPolicy):
        if value.rules not in RULES.values():
            raise SettingError(
                f"its `rules` must be one of otel_retry.RULES ({', '.join(RULES)}), not {value.rules!r}"
            )
        return value
    if isinstance(value, type) and issubclass(value, RetryPolicy):
        raise SettingError(f"an instance is needed, not the class: policy={value.__name__}()")
    if not isinstance(value, str) or value.strip().lower() not in POLICIES:
        raise SettingError(f"it takes one of {', '.join(POLICIES)}, or an instance of otel_retry.RetryPolicy")
    return POLICIES[value.strip().lower()]()


def setting(variable: str, parse: Callable[[object], Any], help_: str, **default: Any) -> Any:
    """A field of `Settings` that knows its environment variable."""
    return field(**default, metadata={"variable": variable, "parse": parse, "help": help_})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that can be set, for all clients or for one. Never for a collection or an operation: the seeds forbid it."""

    policy: RetryPolicy = setting(
        "OTEL_RETRY_POLICY",
        parse_policy,
        "who decides on retries",
        default_factory=BackpressurePolicy,
    )

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        forgiving: bool = False,
    ) -> Settings:
        """Keyword arguments win over the environment, the environment over defaults; None means not given.

        `forgiving` is for auto-instrumentation: a wrong value is logged and the default is used.
        """
        environment = os.environ if environment is None else environment
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}

        def complain(message: str) -> None:
            if not forgiving:
                raise SettingError(message)
            logger.warning("%s; the default is used", message)

        for name in given:
            if name not in known:
                complain(f"otel_retry has no option {name!r}; there are: {', '.join(known)}")
        for name, item in known.items():
            variable = item.metadata["variable"]
            source, value = f"option {name}", given.get(name)
            if value is None and environment.get(variable, "").strip():
                source, value = variable, environment[variable]
            if value is None:
                continue
            try:
                values[name] = item.metadata["parse"](value)
            except SettingError as error:
                complain(f"{source} is {value!r}: {error}")
        return cls(**values)
