"""`otel-retry doctor`: looks at the installation and says, line by line, what is well, what is not, and the fix."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pymongo
from pymongo import MongoClient

from otel_retry.config import SettingError, Settings, otlp_endpoint, shown, source_of
from otel_retry.pymongo.seam import UnknownShape, check
from otel_retry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = (
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-instrumentation",
    "opentelemetry-distro",
)
_RIVALS = {
    "opentelemetry-instrumentation-pymongo": "it is switched off at start, by its own switch",
    "ddtrace": "its PyMongo patches make spans of the same commands: DD_PATCH_MODULES=pymongo:false",
    "sentry-sdk": "its PyMongo integration makes spans of the same commands: disable PyMongoIntegration if that is too much",
    "newrelic": "its agent wraps PyMongo's methods: disable its datastore instrumentation if that is too much",
}


_WAIT_MS = 3000


@dataclass(frozen=True, slots=True)
class Finding:
    """`state`: ok, warn or fail; `fix` says what to do about it."""

    state: str
    what: str
    text: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def examine(uri: str | None = None) -> list[Finding]:
    return [
        *_versions(),
        _shape(),
        *_entry_point(),
        *_collisions(),
        *_settings(),
        _endpoint(),
        *([] if uri is None else _server(uri)),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "otel_retry", __version__)
    good = sys.version_info >= (3, 11)
    yield Finding(
        "ok" if good else "fail",
        "Python",
        platform.python_version(),
        "" if good else "Python 3.11 or later is needed",
    )
    for package in _PACKAGES:
        try:
            yield Finding("ok", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", package, "not installed", "pip install otel-retry")


def _shape() -> Finding:
    try:
        shape = check()
    except UnknownShape as unknown:
        return Finding(
            "fail",
            "PyMongo",
            f"{pymongo.version}: {unknown}; otel_retry would leave its loop alone",
            "use a PyMongo from 4.9.2 to 4.19, or a newer otel-retry",
        )
    return Finding("ok", "PyMongo", f"{shape.version}: its inside is what otel_retry knows")


def _entry_point() -> Iterator[Finding]:
    names = {entry.name for entry in importlib.metadata.entry_points(group="opentelemetry_instrumentor")}
    if "otel_retry" in names:
        yield Finding("ok", "auto-instrumentation", "opentelemetry-instrument will find otel_retry")
    else:
        yield Finding(
            "fail",
            "auto-instrumentation",
            "the entry point is not registered",
            "install the package: pip install otel-retry",
        )
    disabled = source_of("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS") or ""
    if {"otel_retry", "*"} & {name.strip() for name in disabled.split(",")}:
        yield Finding(
            "warn",
            "auto-instrumentation",
            f"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS={shown(disabled)} keeps otel_retry off",
            "take otel_retry out of that variable",
        )
    if (source_of("OTEL_SDK_DISABLED") or "").lower() == "true":
        yield Finding(
            "warn",
            "OpenTelemetry SDK",
            "OTEL_SDK_DISABLED=true: nothing is exported",
            "unset OTEL_SDK_DISABLED",
        )


def _collisions() -> Iterator[Finding]:
    found = False
    for package, what in _RIVALS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = True
        harmless = package.startswith("opentelemetry")
        yield Finding(
            "ok" if harmless else "warn",
            "collisions",
            f"{package} {version} is installed too",
            what if not harmless else "",
        )
    if not found:
        yield Finding("ok", "collisions", "no other instrumentation of PyMongo is installed")


def _settings() -> Iterator[Finding]:
    defaults = Settings()
    for item in dataclasses.fields(Settings):
        variable = item.metadata["variable"]
        if variable is None:
            continue
        given = source_of(variable)
        if given is None:
            yield Finding("ok", item.name, f"{getattr(defaults, item.name)} (the default)")
            continue
        try:
            value = item.metadata["parse"](given)
        except SettingError as error:
            yield Finding(
                "fail", item.name, f"{variable} is {shown(given)}: {error}", f"correct or unset {variable}"
            )
        else:
            yield Finding("ok", item.name, f"{value} (from {variable})")


def _endpoint() -> Finding:
    try:
        endpoint = otlp_endpoint()
    except SettingError as error:
        return Finding("fail", "OTLP endpoint", str(error), "grpc or http/protobuf")
    where = "the address"
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        host, port = parts.hostname or "localhost", parts.port or 4317
        where = f"{host}:{port}"  # and no more of it: it may hold a password or a token
        with socket.create_connection((host, port), timeout=2):
            return Finding("ok", "OTLP endpoint", f"{where} answers")
    except (OSError, ValueError) as error:
        return Finding(
            "warn",
            "OTLP endpoint",
            f"{where} does not answer ({type(error).__name__}): applications run, telemetry is lost",
            "start a collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT",
        )


def _server(uri: str) -> Iterator[Finding]:
    """Never shows the URI: it may hold a password."""
    try:
        with MongoClient[dict[str, Any]](
            uri, serverSelectionTimeoutMS=_WAIT_MS, appname="otel-retry doctor"
        ) as client:
            hello = client.admin.command("hello")
            version = str(client.server_info()["version"])[:40]
            where = client.address
    except Exception as error:  # a wrong URI, or a server that answers anything
        yield Finding(
            "fail",
            "server",
            f"no answer ({type(error).__name__})",
            "check host, port, credentials and TLS options of --uri",
        )
        return
    yield Finding(
        "ok", "server", f"MongoDB {version} at {where[0]}:{where[1]}" if where else f"MongoDB {version}"
    )
    if "setName" in hello or hello.get("msg") == "isdbgrid":
        yield Finding("ok", "retryable writes", "supported: a replica set or sharded cluster")
    else:
        yield Finding(
            "warn",
            "retryable writes",
            "not supported by a standalone server: writes are sent once",
            "run it as a replica set, of one node if need be",
        )
