"""Rules about what may import or touch what, read off the source. A rule that is broken names the file and the line."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import otel_retry

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(otel_retry.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Patterns of files, from the package's folder. Extend these, with a reason, rather than the rules below.
MAY_IMPORT_THE_SDK = (
    "otlp.py",  # setup_otlp(): imported when called
    "demo/*",
    "cli/*",
    "simulation/*",
)
MAY_PRINT = ("cli/*", "demo/*")
MAY_READ_THE_ENVIRONMENT = ("config.py", "mongod.py")
MAY_USE_PRIVATE_NAMES_OF_PYMONGO = ("pymongo/seam/*",)

CORE = (
    "events.py",
    "policy.py",
    "rules.py",
    "machine.py",
    "pacing.py",
    "drivers.py",
    "history.py",
    "idempotence.py",
    "policies/*",
)
NOT_IN_THE_CORE = {"pymongo", "bson", "gridfs", "opentelemetry", "time", "random", "asyncio", "socket"}

PRIVATE_NAMES_OF_PYMONGO = {
    "_ClientConnectionRetryable",
    "_EventListeners",
    "_address",
    "_bulk",
    "_check_last_error",
    "_csot",
    "_deprioritized_servers",
    "_event_listeners",
    "_get_server",
    "_is_retrying",
    "_last_error",
    "_read_pref",
    "_retry_internal",
    "_retry_policy",
    "_retry_with_session",
    "_retryable",
    "_retryable_read",
    "_retryable_write",
    "_retrying",
    "_select_server",
    "_server",
    "_server_selector",
    "_server_session",
    "_session",
    "_starting_transaction",
    "_topology",
    "_transaction",
    "_unpin",
}

# The public API's names are a contract.
CONTRACT = {
    "IdempotenceAware",
    "Logging",
    "RetryDecision",
    "RetryPolicy",
    "attempts",
    "budget",
    "idempotent",
    "instrument",
    "instrument_client",
    "setup_otlp",
    "uninstrument",
}
# The ready-made policies, and what a policy is told and an error's history is made of.
BESIDES = {
    "BackpressurePolicy",
    "CurrentPolicy",
    "DefaultRetryPolicy",
    "DriverPolicy",
    "FallthroughRetryPolicy",
    "OncePolicy",
    "PersistentPolicy",
    "SecondaryFallbackPolicy",
    "Attempt",
    "Failure",
    "Kind",
    "OperationKind",
    "Phase",
    "RULES",
    "Reason",
    "RetryContext",
    "SettingError",
    "__version__",
}


def matching(patterns: tuple[str, ...]) -> set[str]:
    return {name for name in FILES if any(fnmatch(name, pattern) for pattern in patterns)}


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"), filename=name)


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Every module and every name imported, dotted and absolute, wherever the import stands."""
    package = ["otel_retry", *Path(name).parent.parts]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield node.lineno, str(node.args[0].value)


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(name: str) -> set[str]:
    """The private names that a file itself defines: functions, classes, fields, slots, attributes of self."""
    names: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # __slots__
    return {one for one in names if private(one)}


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def uses_of_private_names(name: str) -> Iterator[tuple[int, str]]:
    """Private names of somebody else: attributes that this file does not define, imports, getattr with a constant."""
    own = own_names(name)
    for line, module in imports(name):
        for part in module.split("."):
            if private(part) and within(module, {"pymongo", "gridfs", "bson"}):
                yield line, module
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if node.attr not in own or (node.attr in PRIVATE_NAMES_OF_PYMONGO and not of_self(node)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        }:
            attribute = node.args[1] if len(node.args) > 1 else None
            if isinstance(attribute, ast.Constant) and private(str(attribute.value)):
                yield node.lineno, str(attribute.value)


def found(name: str, uses: Iterator[tuple[int, str]]) -> list[str]:
    return sorted({f"otel_retry/{name}:{line}: {what}" for line, what in uses})


def test_the_files_are_found():
    assert {"__init__.py", "machine.py", "policies/once.py", "pymongo/seam/operation.py"} <= set(FILES)
    assert len(matching(CORE)) >= 12


@pytest.mark.parametrize("name", sorted(set(FILES) - matching(MAY_IMPORT_THE_SDK)))
def test_what_runs_inside_applications_imports_the_opentelemetry_api_only(name):
    forbidden = {"opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.distro"}

    assert found(name, ((line, module) for line, module in imports(name) if within(module, forbidden))) == []


def test_instrumenting_an_application_loads_neither_the_sdk_nor_an_exporter():
    script = """
import json, sys
import otel_retry
from pymongo import MongoClient
otel_retry.instrument()
client = MongoClient("localhost:1", connect=False)
otel_retry.budget(client)
otel_retry.instrument_client(client, policy="current")
loaded = sorted(sys.modules)
otel_retry.uninstrument()
print(json.dumps(loaded))
"""
    # The SDK's own hooks in the environment would load it before us: a bare interpreter has none.
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    loaded = json.loads(answer.stdout)
    assert "otel_retry.machine" in loaded
    assert [one for one in loaded if within(one, {"opentelemetry.sdk", "opentelemetry.exporter"})] == []
    assert [
        one for one in loaded if within(one, {"otel_retry.mongod", "otel_retry.cli", "otel_retry.demo"})
    ] == []


@pytest.mark.parametrize("name", sorted(matching(CORE)))
def test_the_core_knows_no_driver_no_telemetry_no_clock_and_no_chance(name):
    assert (
        found(name, ((line, module) for line, module in imports(name) if within(module, NOT_IN_THE_CORE)))
        == []
    )


@pytest.mark.parametrize("name", sorted(matching(CORE)))
def test_the_core_imports_nothing_of_ours_that_would_bring_them_in(name):
    """Only the core itself and the logger."""
    core = {"otel_retry.logs"} | {
        f"otel_retry.{one.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        for one in matching(CORE)
    }
    foreign = (
        (line, module)
        for line, module in imports(name)
        if within(module, {"otel_retry"}) and module != "otel_retry" and not within(module, core)
    )

    assert found(name, foreign) == []


@pytest.mark.parametrize("name", sorted(set(FILES) - matching(MAY_USE_PRIVATE_NAMES_OF_PYMONGO)))
def test_private_names_of_others_are_used_in_the_seam_alone(name):
    assert found(name, uses_of_private_names(name)) == []


def test_the_search_for_private_names_finds_those_that_the_seam_uses():
    """Or the rule above would be kept by anything."""
    used = {
        what for name in matching(MAY_USE_PRIVATE_NAMES_OF_PYMONGO) for _, what in uses_of_private_names(name)
    }

    assert {
        "_transaction",
        "_unpin",
        "_options",
        "_EventListeners",
        "_performs_write",
    } <= used


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("from pymongo import _csot", {"pymongo._csot"}),
        ("from pymongo.message import _INSERT", {"pymongo.message._INSERT"}),
        ("import pymongo._csot", {"pymongo._csot"}),
        ("import importlib\nimportlib.import_module('pymongo._csot')", {"pymongo._csot"}),
        ("def f(client):\n    return client._topology", {"_topology"}),
        ("def f(client):\n    return getattr(client, '_topology', None)", {"_topology"}),
        (
            "class A:\n    def f(self, client):\n        self._session = 1\n        return client._session",
            {"_session"},
        ),
        ("class A:\n    def f(self):\n        self._mine = 1\n        return self._mine", set()),
        ("def f(a):\n    return a.__class__", set()),
        ("from otel_retry import _x", set()),
    ],
)
def test_a_private_name_is_recognised_in_each_way_of_using_it(monkeypatch, tmp_path, source, uses):
    (tmp_path / "probe.py").write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    tree.cache_clear()
    try:
        assert {what for _, what in uses_of_private_names("probe.py")} == uses
    finally:
        tree.cache_clear()


@pytest.mark.parametrize("name", sorted(set(FILES) - matching(MAY_PRINT)))
def test_a_library_does_not_print(name):
    printed = (
        (node.lineno, "print()")
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"print", "pprint", "breakpoint"}
    )
    assert found(name, printed) == []


@pytest.mark.parametrize("name", sorted(set(FILES) - matching(MAY_READ_THE_ENVIRONMENT)))
def test_the_environment_is_read_in_one_place(name):
    names = {"environ", "environb", "getenv", "getenvb"}
    read = [
        (node.lineno, node.attr)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr in names
    ]
    imported = [(line, module) for line, module in imports(name) if module.removeprefix("os.") in names]

    assert found(name, iter(read + imported)) == []


def test_the_public_names_are_those_of_the_contract():
    public = set(otel_retry.__all__)

    assert sorted(CONTRACT - public) == []
    assert sorted(public - CONTRACT - BESIDES) == []
    assert len(public) == len(otel_retry.__all__)


def test_the_public_names_are_there_and_no_submodule_hides_behind_one():
    for name in otel_retry.__all__:
        assert hasattr(otel_retry, name), name
        assert type(getattr(otel_retry, name)).__name__ != "module", name


def test_the_package_itself_holds_names_and_nothing_else():
    """`__init__.py` imports and lists; what it would define could not be imported apart."""
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr, ast.If)

    assert [type(node).__name__ for node in tree("__init__.py").body if not isinstance(node, allowed)] == []


def test_every_module_says_what_it_does():
    assert [
        name for name in FILES if not ast.get_docstring(tree(name)) and (PACKAGE / name).stat().st_size
    ] == []
