"""MongoDB's OpenTelemetry tests: a runner for files in the unified test format that expect spans.

`python -m tests.conformance.otel_spec [FOLDER]` runs every file below the folder with both drivers against a mongod
of its own, prints a line for each test, and ends with status 1 if one of them failed. A test is skipped where the
file itself says that it does not apply to this server, or where it needs an API that PyMongo 4 has removed;
whatever else the runner cannot do is a failure that names it.
"""
# ruff: noqa: T201 - a script: its output is its purpose

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pymongo
from bson import json_util
from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

import otel_retry
from otel_retry import mongod
from tests.conformance.entities import (
    Entities,
    MismatchError,
    RemovedError,
    RunnerError,
    UnsupportedError,
    completed,
    event_problems,
    only_known,
)
from tests.conformance.matching import JSON_OPTIONS, Span, forest, shown
from tests.conformance.operations import Operations
from tests.flavours import Flavour

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

ROOT = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "OTEL_RETRY_SPEC_DIR"
DEFAULT_FOLDER = ROOT.parent / "shared" / "spec-tests" / "open-telemetry"
FLAVOURS = ("sync", "async")

FILE_KEYS = {
    "description",
    "schemaVersion",
    "runOnRequirements",
    "createEntities",
    "initialData",
    "tests",
    "_yamlAnchors",
}
TEST_KEYS = {
    "description",
    "runOnRequirements",
    "skipReason",
    "operations",
    "expectEvents",
    "expectTracingMessages",
    "outcome",
}
REQUIREMENT_KEYS = {
    "minServerVersion",
    "maxServerVersion",
    "topologies",
    "serverless",
    "serverParameters",
    "auth",
    "authMechanism",
    "csfle",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test of one file."""

    file: str
    """Relative to the folder."""
    content: Mapping[str, Any]
    test: Mapping[str, Any]
    problem: str = ""
    """Why the file could not be read; then there is nothing to run."""

    def __str__(self) -> str:
        return f"{self.file}: {self.test['description']}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    verdict: Literal["pass", "FAIL", "skip"]
    reason: str = ""
    spans: list[Span] = field(default_factory=list)


def folder_to_run(given: str | None = None) -> Path:
    return Path(given or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def cases(folder: Path) -> list[Case]:
    """All tests of all files below the folder, or of the one file that it is."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.json"))
    base = folder.parent if folder.is_file() else folder
    found = [case for file in files for case in _cases_of(file, file.relative_to(base).as_posix())]
    for file in sorted([*folder.rglob("*.yml"), *folder.rglob("*.yaml")]):
        # Upstream each one has its twin; one without would otherwise go unnoticed.
        if not file.with_suffix(".json").exists():
            name = file.relative_to(base).as_posix()
            found.append(_unreadable(name, "only JSON is read: give this file its twin in JSON"))
    return found


def _cases_of(file: Path, name: str) -> Iterator[Case]:
    try:
        content = json_util.loads(file.read_text(encoding="utf-8"), json_options=JSON_OPTIONS)
        for test in content["tests"]:
            yield Case(file=name, content=content, test={"description": "", **test})
    except (OSError, ValueError, TypeError, KeyError) as error:
        yield _unreadable(name, f"not a file in the unified test format: {error!r}")


def _unreadable(name: str, problem: str) -> Case:
    return Case(file=name, content={}, test={"description": "the whole file"}, problem=problem)


class Server:
    """What the tests run against, and the client for what the runner does itself."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        # Not instrumented, so its own commands are in nobody's spans. What blocks for a minute blocks for ever.
        self.client: MongoClient[Any] = MongoClient(
            uri, appname="otel_spec", serverSelectionTimeoutMS=30_000, socketTimeoutMS=60_000
        )
        self.version = tuple(self.client.server_info()["versionArray"][:3])
        hello = self.client.admin.command("hello")
        self.topology = (
            "replicaset" if "setName" in hello else "sharded" if hello.get("msg") == "isdbgrid" else "single"
        )
        self.authenticated = self.client.options.pool_options._credentials is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.close()

    def unmet(self, requirements: Sequence[Mapping[str, Any]]) -> str:
        """Why none of the requirements is met, or nothing."""
        reasons = ["; ".join(self._unmet(requirement)) for requirement in requirements]
        return "" if not all(reasons) else " | ".join(dict.fromkeys(reasons))

    def _unmet(self, requirement: Mapping[str, Any]) -> Iterator[str]:
        only_known("a requirement", requirement, REQUIREMENT_KEYS)
        here = ".".join(map(str, self.version))
        smallest, largest = requirement.get("minServerVersion"), requirement.get("maxServerVersion")
        if smallest and self.version < _version(smallest):
            yield f"needs server {smallest} or later, this is {here}"
        if largest and self.version > _version(largest):
            yield f"needs server {largest} or earlier, this is {here}"
        topologies = requirement.get("topologies", [self.topology])
        if self.topology not in {each.removesuffix("-replicaset") for each in topologies}:
            yield f"needs topology {' or '.join(topologies)}, this is {self.topology}"
        if requirement.get("serverless") == "require":
            yield "needs Atlas Serverless"
        if requirement.get("auth", self.authenticated) is not self.authenticated:
            yield f"needs authentication {'on' if requirement['auth'] else 'off'}"
        if mechanism := requirement.get("authMechanism"):
            known = self._parameter("authenticationMechanisms") or []
            if mechanism.lower() not in {each.lower() for each in known}:
                yield f"needs the authentication mechanism {mechanism}"
        for name, value in requirement.get("serverParameters", {}).items():
            if self._parameter(name) != value:
                yield f"needs the server parameter {name}={value!r}"
        encrypts = importlib.util.find_spec("pymongocrypt") is not None
        wanted = requirement.get("csfle", encrypts) is not False
        if wanted is not encrypts:
            yield f"needs client-side encryption {'' if wanted else 'not '}to be installed"

    def _parameter(self, name: str) -> Any:
        try:
            return self.client.admin.command("getParameter", 1, **{name: 1}).get(name)
        except PyMongoError:
            return None

    def prepare(self, initial_data: Sequence[Mapping[str, Any]]) -> Any:
        """Fill the collections; answers with the cluster time after that."""
        majority = WriteConcern("majority")
        for data in initial_data:
            only_known("initialData", data, {"databaseName", "collectionName", "createOptions", "documents"})
            database = self.client.get_database(data["databaseName"], write_concern=majority)
            name, options = data["collectionName"], data.get("createOptions", {})
            for each in (name, f"enxcol_.{name}.esc", f"enxcol_.{name}.ecoc"):
                database.drop_collection(each)
            if options or not data["documents"]:
                database.create_collection(name, **options)
            if data["documents"]:
                database[name].insert_many(data["documents"])
        return self.client.admin.command("ping").get("$clusterTime")

    def outcome_problems(self, outcome: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for data in outcome:
            only_known("outcome", data, {"databaseName", "collectionName", "documents"})
            collection = self.client[data["databaseName"]].get_collection(
                data["collectionName"], read_concern=ReadConcern("local")
            )
            found = list(collection.find(sort=[("_id", 1)]))
            if found != data["documents"]:
                yield f"{collection.full_name} should hold {shown(data['documents'])}, got {shown(found)}"

    def end_transactions(self) -> None:
        """One that a test left open, such as by commits that all failed, would block the next test."""
        try:
            self.client.admin.command("killAllSessions", [])
        except PyMongoError as error:
            # 11601: killed its own session too.
            if getattr(error, "code", None) not in {11601, 13}:
                raise


def _version(text: str) -> tuple[int, ...]:
    numbers = [int(each) for each in str(text).split("-")[0].split(".")[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def run(case: Case, flavour: str, server: Server) -> Outcome:
    """Run one test with one driver. Never raises for what is in the file or comes of it."""
    try:
        if case.problem:
            raise UnsupportedError(case.problem)
        only_known("the file", case.content, FILE_KEYS)
        only_known("the test", case.test, TEST_KEYS)
        if str(case.content.get("schemaVersion", "")).split(".")[0] != "1":
            raise UnsupportedError(f"schemaVersion {case.content.get('schemaVersion')!r}")
        reason = (
            case.test.get("skipReason")
            or server.unmet(case.content.get("runOnRequirements", []))
            or server.unmet(case.test.get("runOnRequirements", []))
        )
        if reason:
            return Outcome(verdict="skip", reason=reason)
        run_ = _Run(case, Flavour(flavour), server)
        try:
            asyncio.run(run_.execute()) if flavour == "async" else completed(run_.execute())
        except RemovedError:
            raise
        except Exception as error:
            return Outcome(verdict="FAIL", reason=_one_line(error), spans=run_.spans)
        return Outcome(verdict="pass")
    except RemovedError as error:
        return Outcome(verdict="skip", reason=str(error))
    except RunnerError as error:
        return Outcome(verdict="FAIL", reason=_one_line(error))


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, MismatchError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


class _Run:
    """One test with one driver, from its data to its last assertion."""

    def __init__(self, case: Case, flavour: Flavour, server: Server) -> None:
        self._case = case
        self._flavour = flavour
        self._server = server
        self.spans: list[Span] = []

    async def execute(self) -> None:
        content, test = self._case.content, self._case.test
        cluster_time = self._server.prepare(content.get("initialData", []))
        entities = Entities(self._flavour, self._server.uri, cluster_time=cluster_time)
        operations = Operations(entities, self._server.client)
        try:
            try:
                await entities.create(content.get("createEntities", []))
                await operations.run(test["operations"])
            finally:
                await operations.close()
            problems = [
                *self._event_problems(entities, test.get("expectEvents", [])),
                *self._span_problems(entities, test.get("expectTracingMessages", [])),
                *self._server.outcome_problems(test.get("outcome", [])),
            ]
        finally:
            try:
                await entities.close()
            finally:
                otel_retry.uninstrument()
                self._server.end_transactions()
        for name, recorder in entities.observed().items():
            # One that never ends is never exported, so nobody would miss it above.
            problems += [f"{name}: the span {each!r} never ended" for each in recorder.open()]
        if problems:
            raise MismatchError(" | ".join(problems))

    def _span_problems(self, entities: Entities, expectations: Any) -> Iterator[str]:
        # The text of the format has one object here, its schema and its files a list of them.
        for expected in [expectations] if isinstance(expectations, dict) else expectations:
            only_known("expectTracingMessages", expected, {"client", "ignoreExtraSpans", "spans"})
            found = forest(entities.spans(expected["client"]).ended())
            self.spans += found
            ignore = expected.get("ignoreExtraSpans", False)
            yield from entities.matcher.span_problems(expected["spans"], found, ignore_extra=ignore)

    def _event_problems(self, entities: Entities, expectations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for expected in expectations:
            only_known("expectEvents", expected, {"client", "eventType", "events", "ignoreExtraEvents"})
            found = entities.events(expected["client"]).events(expected.get("eventType", "command"))
            wanted = expected["events"]
            if expected.get("ignoreExtraEvents", False):
                found = found[: len(wanted)]
            if len(found) != len(wanted):
                names = [next(iter(each)) for each in wanted]
                yield f"expected the events {names}, got {[type(each).__name__ for each in found]}"
            for each, event in zip(wanted, found, strict=False):
                yield from event_problems(entities.matcher, each, event)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run MongoDB's OpenTelemetry tests.")
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help=f"of JSON files, or one such file; by default ${FOLDER_VARIABLE}, else {DEFAULT_FOLDER}",
    )
    parser.add_argument("--pymongo-flavour", choices=[*FLAVOURS, "both"], default="both")
    parser.add_argument("--spans", action="store_true", help="show what was recorded where a test fails")
    options = parser.parse_args(arguments)
    folder = folder_to_run(options.folder)
    if not (found := cases(folder) if folder.exists() else []):
        print(f"MongoDB's OpenTelemetry tests: nothing to run at {folder}")
        return 0
    flavours = FLAVOURS if options.pymongo_flavour == "both" else (options.pymongo_flavour,)
    counted: Counter[str] = Counter()
    with mongod.deployment() as deployment, Server(deployment.uri) as server:
        here = ".".join(map(str, server.version))
        print(f"MongoDB's OpenTelemetry tests of {folder}, PyMongo {pymongo.version}, server {here}")
        for flavour in flavours:
            for case in found:
                outcome = run(case, flavour, server)
                counted[outcome.verdict] += 1
                reason = f"  [{outcome.reason}]" if outcome.reason else ""
                print(f"{outcome.verdict}  {flavour:<5}  {case}{reason}", flush=True)
                if options.spans:
                    for span in outcome.spans:
                        print("\n".join(f"      {line}" for line in span.lines()))
    print(f"{counted['pass']} passed, {counted['FAIL']} failed, {counted['skip']} skipped")
    return 1 if counted["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
