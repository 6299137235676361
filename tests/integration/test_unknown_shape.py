"""A PyMongo that nobody has looked at yet: instrument() says so once, touches nothing, and the application runs.

Two ways of making one: attributes taken away in this process, one for each question that `shape.check()` asks; and a
copy of the installed package with a name changed throughout, so that the driver itself still works.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pymongo
import pytest

import otel_retry
from otel_retry import instrumentor
from otel_retry.pymongo.seam import shape
from otel_retry.pymongo.seam.shape import UnknownShape

ROOT = Path(__file__).parents[2]
INSTALLED = Path(pymongo.__file__).parent
RUNNER = "_ClientConnectionRetryable"
HALVES = {"synchronous": "", "asynchronous": "Async"}

UNCHECKED = "defect: a private name that the seam uses is not among those that shape.check() looks for"


def driver() -> dict[tuple[str, ...], object]:
    snapshot: dict[tuple[str, ...], object] = {}
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] == "pymongo":
            for attribute, value in list(vars(module).items()):
                snapshot[name, attribute] = value
                if inspect.isclass(value) and value.__module__ == name:
                    snapshot |= {(name, attribute, inner): one for inner, one in list(vars(value).items())}
    return snapshot


def untouched(before: dict[tuple[str, ...], object]) -> bool:
    after = driver()
    return all(key in after and after[key] is value for key, value in before.items())


# One attribute less, here


class Doctor:
    """Takes things away from one half of the driver; monkeypatch puts them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, half: str) -> None:
        self.monkeypatch = monkeypatch
        self.half = half
        self.prefix = HALVES[half]

    def module(self, name: str) -> Any:
        return import_module(f"pymongo.{self.half}.{name}")

    def cls(self, module: str, name: str) -> Any:
        underscore = "_" if name.startswith("_") else ""
        return getattr(self.module(module), f"{underscore}{self.prefix}{name.removeprefix('_')}")

    @property
    def runner(self) -> Any:
        return getattr(self.module("mongo_client"), RUNNER)

    def without_module(self, name: str) -> None:
        self.module(name)  # or there is nothing to take away
        self.monkeypatch.setitem(sys.modules, f"pymongo.{self.half}.{name}", None)

    def without(self, owner: Any, name: str) -> None:
        self.monkeypatch.delattr(owner, name)

    def forgetting(self, function: Any, name: str) -> None:
        """The function no longer mentions the name."""
        function = getattr(function, "__wrapped__", function)
        code = function.__code__
        assert name in code.co_names
        names = tuple("renamed" if each == name else each for each in code.co_names)
        self.monkeypatch.setattr(function, "__code__", code.replace(co_names=names))


METHODS = ("run", "_read", "_write", "_get_server", "_is_retrying", "_check_last_error")

CASES: dict[str, tuple[Any, str]] = {
    "no module mongo_client": (lambda d: d.without_module("mongo_client"), "mongo_client"),
    "no runner": (lambda d: d.without(d.module("mongo_client"), RUNNER), f"has no {RUNNER}"),
    **{
        f"runner has no {method}": (lambda d, m=method: d.without(d.runner, m), f"{RUNNER} has no {method}")
        for method in METHODS
    },
    **{
        f"runner sets no {name}": (
            lambda d, n=name: d.forgetting(d.runner.__init__, n),
            f"{RUNNER} has no {name}",
        )
        for name in sorted(shape._ATTRIBUTES)
    },
    **{
        f"{method} calls no {name}": (
            lambda d, m=method, n=name: d.forgetting(getattr(d.runner, m), n),
            f"{RUNNER}.{method} no longer calls",
        )
        for method, name in (("run", "_read"), ("run", "_write"), ("_read", "_func"), ("_write", "_func"))
    },
    "no client": (lambda d: d.without(d.module("mongo_client"), f"{d.prefix}MongoClient"), "MongoClient"),
    "no _retry_internal": (
        lambda d: d.without(d.cls("mongo_client", "MongoClient"), "_retry_internal"),
        "MongoClient has no _retry_internal",
    ),
    "_retry_internal makes no runner": (
        lambda d: d.forgetting(d.cls("mongo_client", "MongoClient")._retry_internal, RUNNER),
        f"_retry_internal no longer makes a {RUNNER}",
    ),
    "no module client_session": (lambda d: d.without_module("client_session"), "client_session"),
    "no session": (
        lambda d: d.without(d.module("client_session"), f"{d.prefix}ClientSession"),
        "ClientSession",
    ),
    **{
        f"session has no {method}": (
            lambda d, m=method: d.without(d.cls("client_session", "ClientSession"), m),
            f"ClientSession has no {method}",
        )
        for method in ("start_transaction", "commit_transaction", "abort_transaction", "_unpin")
    },
    **{
        f"{words} of {module}": (lambda d, m=module, b=bulk, c=change: c(d, m, b), expected)
        for module, bulk in (("bulk", "_Bulk"), ("client_bulk", "_ClientBulk"))
        for words, change, expected in (
            ("no module", lambda d, m, b: d.without_module(m), "there is no module"),
            ("no class", lambda d, m, b: d.without(d.module(m), d.cls(m, b).__name__), "has no _"),
            (
                "no _execute_command",
                lambda d, m, b: d.without(d.cls(m, b), "_execute_command"),
                "_execute_command",
            ),
            (
                "no retrying",
                lambda d, m, b: d.forgetting(d.cls(m, b)._execute_command, "retrying"),
                "`retrying`",
            ),
            (
                "retrying in the class",
                lambda d, m, b: d.monkeypatch.setattr(d.cls(m, b), "retrying", False, raising=False),
                "`retrying`",
            ),
        )
    },
}


@pytest.fixture(autouse=True)
def _off(monkeypatch):
    """Before monkeypatch puts back what it took away."""
    yield
    otel_retry.uninstrument()


def warned_once(caplog: pytest.LogCaptureFixture, missing: str) -> bool:
    records = [record for record in caplog.records if record.name == "otel_retry"]
    assert [record.levelno for record in records] == [logging.WARNING]
    [message] = [record.getMessage() for record in records]
    assert f"PyMongo {pymongo.version}:" in message
    assert missing in message
    return True


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_one_thing_missing_is_named_in_one_warning_and_nothing_is_patched(monkeypatch, caplog, half, case):
    take_away, missing = CASES[case]
    take_away(Doctor(monkeypatch, half))
    before = driver()

    with pytest.raises(UnknownShape):
        shape.check()
    otel_retry.instrument()

    assert warned_once(caplog, missing)
    assert not instrumentor._seam.installed
    assert untouched(before)
    otel_retry.uninstrument()
    assert untouched(before)


def test_an_older_pymongo_is_named(monkeypatch, caplog):
    monkeypatch.setattr(pymongo, "version_tuple", (4, 8, 0))
    monkeypatch.setattr(pymongo, "version", "4.8.0")
    before = driver()

    otel_retry.instrument()

    assert warned_once(caplog, "older than 4.9")
    assert untouched(before)


@pytest.mark.parametrize(
    ("take_away", "missing"),
    [
        (lambda patch: patch.setitem(sys.modules, "pymongo._csot", None), "there is no module pymongo._csot"),
        (lambda patch: patch.delattr("pymongo._csot.remaining"), "pymongo._csot has no remaining"),
    ],
    ids=["no module _csot", "no remaining"],
)
def test_missing_deadlines_are_named(monkeypatch, caplog, take_away, missing):
    take_away(monkeypatch)
    before = driver()

    otel_retry.instrument()

    assert warned_once(caplog, missing)
    assert untouched(before)


def test_instrumenting_one_client_warns_and_touches_nothing_either(monkeypatch, caplog):
    monkeypatch.delattr(f"pymongo.synchronous.mongo_client.{RUNNER}")
    before = driver()
    client = pymongo.MongoClient("localhost:1", connect=False)

    otel_retry.instrument_client(client, policy="current")

    assert warned_once(caplog, f"has no {RUNNER}")
    assert untouched(before)


def test_a_wrong_setting_is_an_error_also_where_the_driver_is_unknown(monkeypatch, caplog):
    monkeypatch.delattr(f"pymongo.synchronous.mongo_client.{RUNNER}")

    with pytest.raises(otel_retry.SettingError):
        otel_retry.instrument(policy="nonsense")

    assert caplog.records == []


def test_after_a_driver_came_to_be_known_instrument_works(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.delattr(f"pymongo.synchronous.mongo_client.{RUNNER}")
        otel_retry.instrument()
        assert not instrumentor._seam.installed

    otel_retry.instrument()

    assert instrumentor._seam.installed
    assert warned_once(caplog, RUNNER)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("method", ["__init__", "run", "_read", "_write"])
def test_a_method_that_is_no_python_function_is_an_unknown_shape_too(monkeypatch, caplog, half, method):
    """Compiled, say, or wrapped in an object."""
    monkeypatch.setattr(Doctor(monkeypatch, half).runner, method, len)

    otel_retry.instrument()

    assert warned_once(caplog, RUNNER)


# One name changed throughout, in a process of its own


SCRIPT = """
import asyncio, inspect, json, logging, sys
uri, database = sys.argv[1:]
said = []

class Keep(logging.Handler):
    def emit(self, record):
        said.append([record.levelname, record.getMessage()])

logging.getLogger("otel_retry").addHandler(Keep())
import pymongo
import pymongo.asynchronous.mongo_client, pymongo.synchronous.mongo_client, pymongo.monitoring
import otel_retry

def driver():
    snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pymongo":
            for attribute, value in list(vars(module).items()):
                snapshot[name, attribute] = value
                if inspect.isclass(value) and value.__module__ == name:
                    snapshot |= {(name, attribute, inner): one for inner, one in list(vars(value).items())}
    return snapshot

before = driver()
otel_retry.instrument()
after = driver()
patched = sorted({".".join(key) for key, value in before.items() if after.get(key) is not value})

def increment(session):
    c.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

def work():
    global c
    with pymongo.MongoClient(uri) as client:
        c = client[database].c
        c.insert_many([{"_id": n} for n in range(10)])
        c.bulk_write([pymongo.InsertOne({"_id": 10}), pymongo.UpdateMany({}, {"$set": {"x": 1}})])
        with client.start_session() as session:
            session.with_transaction(increment)
        try:
            c.insert_one({"_id": 1})
        except pymongo.errors.DuplicateKeyError:
            pass
        client[database].command("ping")
        return [len(list(c.find({}, batch_size=3))), c.find_one({"_id": 1})["n"], c.count_documents({"x": 1})]

async def work_async():
    async with pymongo.AsyncMongoClient(uri) as client:
        c = client[database].d
        await c.insert_one({"_id": 1})
        await client[database].command("ping")
        return [one["_id"] async for one in c.find({}, batch_size=3)]

results = [work(), asyncio.run(work_async())]
otel_retry.uninstrument()
after = driver()
restored = all(value is after[key] for key, value in before.items())
facts = {"file": pymongo.__file__, "said": said, "patched": patched, "results": results, "restored": restored}
print(json.dumps(facts | {"version": pymongo.version}))
"""
RESULTS = [[11, 1, 11], [1]]


def renamed(old: str, new: str, *files: str) -> Any:
    """A whole word, in the named files or in all."""

    def edit(package: Path) -> None:
        changed = 0
        for path in [package / name for name in files] or package.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            edited, count = re.subn(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
            if count:
                path.unlink()  # a hard link to the installed one
                path.write_text(edited, encoding="utf-8")
                changed += count
        assert changed, f"{old} is not in this PyMongo"

    return edit


def moved(old: str, new: str) -> Any:
    """A module under another name."""

    def edit(package: Path) -> None:
        for half in ("synchronous", "asynchronous"):
            (package / half / f"{old}.py").rename(package / half / f"{new}.py")
            renamed(f"pymongo.{half}.{old}", f"pymongo.{half}.{new}")(package)

    return edit


def version(number: str) -> Any:
    return renamed(f'"{pymongo.version}"', f'"{number}"', "_version.py")


CLIENTS = ("synchronous/mongo_client.py", "asynchronous/mongo_client.py")


@pytest.fixture
def doctored(tmp_path, deployment, database_name):
    """Runs the script above with a copy of PyMongo that was edited, and gives back what it found."""

    def run(edit: Any) -> dict[str, Any]:
        package = tmp_path / "pymongo"
        shutil.copytree(INSTALLED, package, copy_function=linked)
        edit(package)
        answer = subprocess.run(
            [sys.executable, "-c", SCRIPT, deployment.uri, database_name],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        facts = json.loads(answer.stdout)
        assert Path(facts["file"]).is_relative_to(tmp_path)
        return facts

    return run


def linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.mark.parametrize(
    ("edit", "missing"),
    [
        pytest.param(version("4.8.0"), "older than 4.9", id="an older version"),
        pytest.param(renamed(RUNNER, "_Renamed"), f"has no {RUNNER}", id="the runner"),
        pytest.param(renamed("_is_retrying", "_renamed", *CLIENTS), "has no _is_retrying", id="a method"),
        pytest.param(renamed("_read_pref", "_renamed", *CLIENTS), "has no _read_pref", id="an attribute"),
        pytest.param(
            renamed("_retry_internal", "_renamed"), "has no _retry_internal", id="the client's method"
        ),
        pytest.param(moved("bulk", "batch"), "there is no module pymongo.synchronous.bulk", id="a module"),
        pytest.param(renamed("retrying", "again"), "`retrying`", id="the bulk's flag"),
        pytest.param(renamed("_unpin", "_renamed"), "has no _unpin", id="the session's method"),
        pytest.param(renamed("remaining", "renamed"), "has no remaining", id="the deadline"),
    ],
)
def test_an_application_runs_on_an_unknown_driver_with_one_warning_and_no_patch(doctored, edit, missing):
    facts = doctored(edit)

    [[level, message]] = facts["said"]
    assert level == "WARNING"
    assert f"PyMongo {facts['version']}:" in message
    assert missing in message
    assert facts["patched"] == []
    assert facts["results"] == RESULTS
    assert facts["restored"]


@pytest.mark.parametrize("number", [pymongo.version, "4.99.0", "4.19.0.dev0"])
def test_a_driver_of_known_shape_is_patched_without_a_word_whatever_its_version(doctored, number):
    """A later version is judged by what it is, not by its number."""
    if pymongo.version_tuple[:2] < (4, 18) and number != pymongo.version:
        pytest.skip("this PyMongo has not the shape that the number stands for")

    facts = doctored(version(number) if number != pymongo.version else lambda package: None)

    assert facts["version"] == number
    assert facts["said"] == []
    assert f"pymongo.synchronous.mongo_client.{RUNNER}" in facts["patched"]
    assert facts["results"] == RESULTS
    assert facts["restored"]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(edit, id=name)
        for name, edit in {
            "imported at the top: _csot": lambda package: (
                (package / "_csot.py").rename(package / "_deadlines.py"),
                renamed("_csot", "_deadlines")(package),
            ),
            "imported at the top: _INSERT": renamed("_INSERT", "_RENAMED"),
            "imported at the top: _randint": renamed("_randint", "_renamed"),
            "of the client's options: _options": renamed(
                "_options", "_renamed", "client_options.py", *CLIENTS
            ),
            "of the session: _transaction": renamed("_transaction", "_renamed"),
            "of the client: _event_listeners": renamed("_event_listeners", "_renamed"),
        }.items()
    ],
)
def test_a_private_name_that_is_gone_never_takes_the_application_down(doctored, edit):
    facts = doctored(edit)

    assert facts["results"] == RESULTS
    assert facts["restored"]
