"""Settings: the one parser for keyword arguments and environment variables, and the only reader of the latter.

A wrong value is an error that names the setting, what it got and what it takes. Under auto-instrumentation nobody
is there to catch it: it is logged, and the default holds.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from otel_retry.logs import logger
from otel_retry.policies import POLICIES, BackpressurePolicy
from otel_retry.policy import RULES, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_retry.telemetry.hooks import Hook


_STATEMENT_LENGTH = 1024
_LONGEST_SHOWN = 200
_LONGEST_NAME = 200

ALL, RETRIED = "all", "retried"


class SettingError(ValueError):
    """A setting has a value that it cannot take. The message says which, what, and what is possible."""


def shown(value: object) -> str:
    """A value that somebody set, for a message: short, and of an address only the scheme. It may be a MongoDB URI that
    went into the wrong variable, with the password in it, escaped or not.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    before, scheme, _ = text.partition("://")
    if scheme:
        text = f"{before}://…"
    if "@" in text:
        text = f"…@{text.rpartition('@')[2]}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def parse_policy(value: object) -> RetryPolicy:
    """A policy's name, or an instance of RetryPolicy."""
    if isinstance(value, RetryPolicy):
        if value.rules not in RULES.values():
            raise SettingError(
                f"its `rules` must be one of otel_retry.RULES ({', '.join(RULES)}), not {shown(value.rules)}"
            )
        if len(str(value)) > _LONGEST_NAME:
            raise SettingError(f"its name, which goes into metrics, has more than {_LONGEST_NAME} characters")
        return value
    if isinstance(value, type) and issubclass(value, RetryPolicy):
        raise SettingError(f"an instance is needed, not the class: policy={value.__name__}()")
    if not isinstance(value, str) or value.strip().lower() not in POLICIES:
        raise SettingError(f"it takes one of {', '.join(POLICIES)}, or an instance of otel_retry.RetryPolicy")
    return POLICIES[value.strip().lower()]()


def parse_bool(value: object) -> bool:
    """As MongoDB's specification spells it, and what people write beside it."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise SettingError("it takes true or false")


def parse_length(value: object) -> int:
    """A number of characters or of things: 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise SettingError("it takes a whole number, 0 or more")
    try:
        number = int(value)
    except ValueError:
        raise SettingError("it takes a whole number, 0 or more") from None
    if number < 0:
        raise SettingError("it takes a whole number, 0 or more")
    return number


def parse_attempt_spans(value: object) -> str:
    """Which attempts have spans."""
    word = value.strip().lower() if isinstance(value, str) else None
    if word not in {ALL, RETRIED}:
        raise SettingError(f"it takes {ALL} or {RETRIED}")
    return word


def parse_hook(value: object) -> Hook:
    if not callable(value):
        raise SettingError("it takes a function of a span and a PyMongo event")
    return value


def parse_provider(method: str) -> Callable[[object], Any]:
    def parse(value: object) -> Any:
        if not callable(getattr(value, method, None)):
            raise SettingError(f"it takes an OpenTelemetry provider, something with a {method}()")
        return value

    return parse


def _read(parse: Callable[[object], Any], value: object) -> Any:
    try:
        return parse(value)
    except SettingError:
        raise
    except Exception as error:  # a value whose own methods fail
        raise SettingError(f"it cannot be read, it raised {type(error).__name__}") from None


def setting(variable: str | None, parse: Callable[[object], Any], help_: str, **default: Any) -> Any:
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
    enabled: bool = setting(
        "OTEL_PYTHON_INSTRUMENTATION_MONGODB_ENABLED",
        parse_bool,
        "spans and metrics; the policy holds either way",
        default=True,
    )
    metrics: bool = setting("OTEL_RETRY_METRICS", parse_bool, "metrics", default=True)
    attempt_spans: str = setting(
        "OTEL_RETRY_ATTEMPT_SPANS",
        parse_attempt_spans,
        "`all`: a span for each attempt; `retried`: only where an operation failed or was retried, for a smaller bill",
        default=ALL,
    )
    query_text_max_length: int = setting(
        "OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH",
        parse_length,
        "the longest `db.query.text`, in characters; 0: no such attribute",
        default=0,
    )
    query_text_raw: bool = setting(
        "OTEL_RETRY_QUERY_TEXT_RAW",
        parse_bool,
        "keep the values in `db.query.text` and the servers' own words in errors, instead of `?`",
        default=False,
    )
    max_collections: int = setting(
        "OTEL_RETRY_MAX_COLLECTIONS",
        parse_length,
        "how many collections metrics tell apart for each client; those beyond are `_other`",
        default=200,
    )
    capture_statement: bool = setting(
        None,
        parse_bool,
        "as in opentelemetry-instrumentation-pymongo: `db.query.text` of up to 1,024 characters",
        default=False,
    )
    request_hook: Hook | None = setting(None, parse_hook, "called when a command was sent", default=None)
    response_hook: Hook | None = setting(None, parse_hook, "called when a command succeeded", default=None)
    failed_hook: Hook | None = setting(None, parse_hook, "called when a command failed", default=None)
    tracer_provider: Any = setting(
        None, parse_provider("get_tracer"), "where spans go; the global one otherwise", default=None
    )
    meter_provider: Any = setting(
        None, parse_provider("get_meter"), "where metrics go; the global one otherwise", default=None
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
                complain(f"otel_retry has no option {shown(name)}; there are: {', '.join(known)}")
        for name, item in known.items():
            variable = item.metadata["variable"]
            source, value = f"option {name}", given.get(name)
            if value is None and variable is not None and environment.get(variable, "").strip():
                source, value = variable, environment[variable]
            if value is None:
                continue
            try:
                values[name] = _read(item.metadata["parse"], value)
            except SettingError as error:
                complain(f"{source} is {shown(value)}: {error}")
        if values.get("capture_statement"):
            values.setdefault("query_text_max_length", _STATEMENT_LENGTH)
        return cls(**values)


def otlp_protocol(signal: str, environment: Mapping[str, str] | None = None) -> str:
    """`grpc` or `http/protobuf`, by OpenTelemetry's own variables; grpc where they say nothing, as in the distro."""
    environment = os.environ if environment is None else environment
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environment.get(variable, "").strip()
        if value in {"grpc", "http/protobuf"}:
            return value
        if value:
            raise SettingError(f"{variable} is {shown(value)}: it takes grpc or http/protobuf")
    return "grpc"


def otlp_wanted(signal: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a signal is to be exported at all: `OTEL_METRICS_EXPORTER=none` is for backends that take traces only."""
    environment = os.environ if environment is None else environment
    variable = f"OTEL_{signal}_EXPORTER"
    value = environment.get(variable, "").strip().lower()
    if value not in {"", "otlp", "none"}:
        raise SettingError(f"{variable} is {shown(value)}: setup_otlp takes otlp or none")
    return value != "none"


def otlp_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """Where the exporters of traces send to, by OpenTelemetry's own variables and defaults."""
    environment = os.environ if environment is None else environment
    default = (
        "http://localhost:4317" if otlp_protocol("TRACES", environment) == "grpc" else "http://localhost:4318"
    )
    return (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or default
    )


def source_of(variable: str) -> str | None:
    """A variable's value as it stands, or None."""
    return os.environ.get(variable) or None


def otlp_http_endpoint(environment: Mapping[str, str] | None = None) -> str | None:
    """An OTLP endpoint over HTTP that somebody has set, or that answers on localhost; None: neither.

    A gRPC endpoint on the usual port has its HTTP twin on the next one.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip().rstrip("/")
    if given:
        return given.replace(":4317", ":4318") if given.endswith(":4317") else given
    try:
        with socket.create_connection(("localhost", 4318), timeout=0.5):
            return "http://localhost:4318"
    except OSError:
        return None


def inherited() -> dict[str, str]:
    """The whole environment, for a process of ours."""
    return dict(os.environ)
