"""Real Jaeger, Collector and Prometheus, run with the files of `examples/stack` just as they lie there.

The files take addresses and ports from the environment (the Collector and Jaeger) or from the command line
(Prometheus): nothing in them is rewritten, and `environment()` sets nothing but addresses and ports.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Self

from scripts import backends
from tests.e2e.processes import HOST, Program, free_ports, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

FILES = backends.ROOT / "examples" / "stack"

# How long the Collector thinks about a trace (decision_wait in collector.yaml), and what a busy machine may add to it.
DECISION_SECONDS = 10.0
ARRIVAL_SECONDS = DECISION_SECONDS + 80.0
# So long must nothing new have come for a test to believe that it was all.
SETTLED_SECONDS = 5.0

# ${env:NAME:-default}, as the Collector and Jaeger read it.
REFERENCE = re.compile(r"\$\{env:(?P<name>[A-Z0-9_]+):-(?P<default>[^}]*)\}")


def references(file: Path) -> dict[str, str]:
    """Each variable that a configuration reads, with its default."""
    return {found["name"]: found["default"] for found in REFERENCE.finditer(file.read_text(encoding="utf-8"))}


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span as Jaeger gives it back, in OTLP's own shape made handy."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str, dict[str, Any]]]
    failed: bool
    message: str
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Trace:
    spans: list[Span] = field(default_factory=list)

    @property
    def root(self) -> Span:
        known = {span.span_id for span in self.spans}
        [root] = [span for span in self.spans if span.parent_id not in known]
        return root

    def children(self, parent: Span) -> list[Span]:
        return sorted(
            (span for span in self.spans if span.parent_id == parent.span_id), key=lambda span: span.start
        )


class Jaeger:
    """Jaeger's query API, as its own UI and Grafana use it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def services(self) -> list[str]:
        return _get(f"{self.url}/api/services")["data"] or []

    def trace(self, trace_id: str) -> Trace | None:
        """By id, through the API that keeps all of OTLP; None where there is no such trace."""
        try:
            answer = _get(f"{self.url}/api/v3/traces/{trace_id}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return Trace([span for part in _parts(answer) for span in _spans(part)])

    def search(
        self,
        service: str,
        *,
        tags: Mapping[str, Any] | None = None,
        operation: str | None = None,
        limit: int = 10_000,
    ) -> dict[str, dict[str, Any]]:
        """By trace id, what the search box of the UI finds in the last hour."""
        query = {"service": service, "limit": limit, "lookback": "1h"}
        now = time.time()
        query |= {"start": int((now - 3600) * 1e6), "end": int((now + 60) * 1e6)}
        if operation:
            query["operation"] = operation
        if tags:
            query["tags"] = json.dumps({name: str(value) for name, value in tags.items()})
        found = _get(f"{self.url}/api/traces?{urllib.parse.urlencode(query)}")
        return {trace["traceID"].zfill(32): trace for trace in found["data"] or []}


class Prometheus:
    """Prometheus' query API, as Grafana uses it."""

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url = url
        self._timeout = timeout

    def query(self, expression: str, *, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, each with `metric` (its labels) and `value`."""
        return self._ask("query", query=expression, **({} if at is None else {"time": at}))["result"]

    def query_range(
        self, expression: str, *, seconds: float = 300.0, step: float = 5.0, until: float | None = None
    ) -> list[dict[str, Any]]:
        end = time.time() if until is None else until
        return self._ask("query_range", query=expression, start=end - seconds, end=end, step=step)["result"]

    def value(self, expression: str) -> float:
        """The only value of an expression; 0 where it has none."""
        found = self.query(expression)
        assert len(found) < 2, f"{expression} has {len(found)} series: {found}"
        return float(found[0]["value"][1]) if found else 0.0

    def exemplars(self, expression: str, *, seconds: float = 3600.0) -> list[dict[str, Any]]:
        """Each with `labels` (of the exemplar), `value`, `timestamp`, and `series` (the labels of its series)."""
        now = time.time()
        found = self._ask("query_exemplars", query=expression, start=now - seconds, end=now + 60)
        return [
            {**each, "series": series["seriesLabels"]} for series in found for each in series["exemplars"]
        ]

    def alerts(self) -> list[dict[str, Any]]:
        return self._ask("alerts")["alerts"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **parameters: Any) -> Any:
        body = urllib.parse.urlencode(parameters).encode()
        # Long expressions do not fit into an address; alerts and rules take no POST.
        url, data = f"{self.url}/api/v1/{what}", body or None
        try:
            return _get(url, data, timeout=self._timeout)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"Prometheus refuses {parameters}: {error.read().decode()}") from error


class Backends:
    """Jaeger, Prometheus and one Collector, up and connected.

    `jaeger` and `prometheus` ask; `programs` kills and restarts; `endpoint` is where an application sends its OTLP.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = ["JAEGER_GRPC", "JAEGER_QUERY", "JAEGER_QUERY_GRPC", "JAEGER_HEALTH", "PROMETHEUS"]
        self._ports = free_ports([*names, *_collector_ports()])
        self.endpoint = f"http://{HOST}:{self._ports['COLLECTOR_GRPC']}"
        self.jaeger = Jaeger(f"http://{HOST}:{self._ports['JAEGER_QUERY']}")
        self.prometheus = Prometheus(f"http://{HOST}:{self._ports['PROMETHEUS']}")
        self.programs = {
            "jaeger": Program(
                "jaeger",
                [str(backends.JAEGER.path()), f"--config={FILES / 'jaeger.yaml'}"],
                folder=folder,
                environment=environment(self._ports),
                ready=f"http://{HOST}:{self._ports['JAEGER_HEALTH']}/status",
            ),
            "prometheus": Program(
                "prometheus",
                [
                    str(backends.PROMETHEUS.path()),
                    *prometheus_options(),
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address={HOST}:{self._ports['PROMETHEUS']}",
                ],
                folder=folder,
                ready=f"{self.prometheus.url}/-/ready",
            ),
            "collector": self._collector("collector", FILES / "collector.yaml", self._ports),
        }

    def __enter__(self) -> Self:
        try:
            for program in self.programs.values():
                program.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for program in self.programs.values():
            program.kill()

    @contextlib.contextmanager
    def collector(self, name: str, file: str, **addresses: str) -> Iterator[str]:
        """One more Collector with another file of the stack; answers its OTLP address, `host:port`."""
        ports = free_ports(_collector_ports())
        program = self._collector(name, FILES / file, ports, addresses)
        try:
            program.start()
            yield f"{HOST}:{ports['COLLECTOR_GRPC']}"
        finally:
            program.kill()

    @contextlib.contextmanager
    def away(self, name: str) -> Iterator[None]:
        """A program is killed, and is back afterwards."""
        self.programs[name].kill()
        try:
            yield
        finally:
            self.programs[name].start()

    def wait_until(self, condition: Any, complaint: str, *, timeout: float = ARRIVAL_SECONDS) -> Any:
        """The first true answer of `condition`; afterwards the end of each backend's log is in the error."""
        return wait_until(condition, complaint, *self.programs.values(), timeout=timeout)

    def wait_for_traces(
        self, service: str, trace_ids: Iterable[str], *, timeout: float = ARRIVAL_SECONDS
    ) -> dict[str, dict[str, Any]]:
        """What Jaeger has of the service, as soon as these traces are among it."""
        wanted = set(trace_ids)
        found: dict[str, dict[str, Any]] = {}

        def arrived() -> bool:
            found.clear()
            with contextlib.suppress(OSError, HTTPException):
                found.update(self.jaeger.search(service))
            return wanted <= found.keys()

        self.wait_until(
            arrived, f"some of {len(wanted)} traces of {service} are not in Jaeger", timeout=timeout
        )
        return found

    def wait_until_settled(self, service: str) -> None:
        """Until Jaeger gets no more spans of the service: what was decided together travels in several batches."""
        had, since = -1, time.monotonic()

        def settled() -> bool:
            nonlocal had, since
            has = sum(len(trace["spans"]) for trace in self.jaeger.search(service).values())
            if has != had:
                had, since = has, time.monotonic()
            return time.monotonic() - since > SETTLED_SECONDS

        self.wait_until(settled, f"the spans of {service} do not come to an end")

    def _collector(
        self, name: str, file: Path, ports: Mapping[str, int], addresses: Mapping[str, str] | None = None
    ) -> Program:
        return Program(
            name,
            [str(backends.COLLECTOR.path()), f"--config={file}"],
            folder=self._folder,
            environment={**environment(self._ports), **_port_variables(ports), **(addresses or {})},
            ready=f"http://{HOST}:{ports['COLLECTOR_HEALTH']}",
        )


def environment(ports: Mapping[str, int]) -> dict[str, str]:
    """All that differs from docker-compose.yaml: where the programs listen, and where they find each other."""
    return {
        "COLLECTOR_HOST": HOST,
        "JAEGER_HOST": HOST,
        "JAEGER_OTLP": f"{HOST}:{ports['JAEGER_GRPC']}",
        "PROMETHEUS_OTLP": f"http://{HOST}:{ports['PROMETHEUS']}/api/v1/otlp",
        **_port_variables(ports),
    }


def prometheus_options() -> list[str]:
    """Those of docker-compose.yaml that are neither a path nor a period."""
    text = (FILES / "docker-compose.yaml").read_text(encoding="utf-8")
    options = re.findall(r"^ +- (--(?:web\.enable|enable-feature)[^\s]*)$", text, re.MULTILINE)
    return [f"--config.file={FILES / 'prometheus.yaml'}", *options]


def _collector_ports() -> list[str]:
    return ["COLLECTOR_GRPC", "COLLECTOR_HTTP", "COLLECTOR_HEALTH"]


def _port_variables(ports: Mapping[str, int]) -> dict[str, str]:
    return {f"{name}_PORT": str(port) for name, port in ports.items() if name != "PROMETHEUS"}


def _get(url: str, data: bytes | None = None, *, timeout: float = 30.0) -> Any:
    with urllib.request.urlopen(url, data, timeout=timeout) as response:
        return json.load(response)


def _parts(answer: Any) -> list[Any]:
    found = answer.get("result", answer).get("resourceSpans", [])
    return found if isinstance(found, list) else [found]


def _spans(part: Any) -> Iterator[Span]:
    resource = _attributes(part["resource"])
    for scope in part["scopeSpans"]:
        for span in scope["spans"]:
            status = span.get("status", {})
            yield Span(
                trace_id=span["traceId"],
                span_id=span["spanId"],
                parent_id=span.get("parentSpanId", ""),
                name=span["name"],
                service=resource["service.name"],
                attributes=_attributes(span),
                events=[(event["name"], _attributes(event)) for event in span.get("events", [])],
                links=[
                    (link["traceId"], link["spanId"], _attributes(link)) for link in span.get("links", [])
                ],
                failed=status.get("code") in {2, "STATUS_CODE_ERROR"},
                message=status.get("message", ""),
                start=int(span["startTimeUnixNano"]),
                end=int(span["endTimeUnixNano"]),
            )


def _attributes(of: Any) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", [])}


def _value(value: Any) -> Any:
    [(kind, content)] = value.items()
    return int(content) if kind == "intValue" else content
