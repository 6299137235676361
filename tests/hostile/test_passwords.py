"""URIs with passwords: in no span, metric, log, history, error of ours or report of the doctor."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import otel_retry
from otel_retry.cli.main import cli
from otel_retry.config import SettingError, Settings, otlp_protocol, otlp_wanted, shown
from otel_retry.history import describe
from tests.fakes.wire_server import error
from tests.flavours import resolve
from tests.hostile.bench import hostile, outcome, where

PASSWORD = "s3cret"
URIS = [
    f"mongodb://user:{PASSWORD}@host/",
    f"mongodb://user:p@{PASSWORD}@host/",
    f"mongodb://user:a/{PASSWORD}@host:1/db?x=1",
    f"mongodb://user:{PASSWORD}",
    f"mongodb+srv://user:{PASSWORD}@host/?authSource=admin",
    f"mongodb://host/?tlsCertificateKeyFilePassword={PASSWORD}",
    f"mongodb://user:%zz{PASSWORD}@[::1",
    f"user:{PASSWORD}@host",
    f"http://user:{PASSWORD}@host:4317/path?token={PASSWORD}",
    f" mongodb://user:x\n{PASSWORD}@host",
]
VARIABLES = [
    "OTEL_RETRY_POLICY",
    "OTEL_RETRY_METRICS",
    "OTEL_RETRY_MAX_COLLECTIONS",
    "OTEL_PYTHON_INSTRUMENTATION_MONGODB_QUERY_TEXT_MAX_LENGTH",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
]


@pytest.mark.parametrize("uri", URIS)
def test_in_the_wrong_setting_it_is_not_repeated(uri, logged):
    attempts = [
        lambda name=name: Settings.load({name: uri}, environment={})
        for name in ("policy", "metrics", "max_collections")
    ]
    attempts += [lambda name=name: Settings.load({}, environment={name: uri}) for name in VARIABLES[:4]]
    attempts += [
        lambda: Settings.load({uri: 1}, environment={}),
        lambda: Settings.load({"policy": [uri]}, environment={}),
        lambda: Settings.load({"request_hook": uri}, environment={}),
        lambda: otlp_protocol("TRACES", {"OTEL_EXPORTER_OTLP_PROTOCOL": uri}),
        lambda: otlp_wanted("TRACES", {"OTEL_TRACES_EXPORTER": uri}),
    ]
    for attempt in attempts:
        with pytest.raises(SettingError) as caught:
            attempt()
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    Settings.load({"policy": uri}, environment=dict.fromkeys(VARIABLES[:4], uri), forgiving=True)
    assert logged.lines
    assert PASSWORD not in "".join(logged.lines)


@hostile
@given(st.text(max_size=20), st.text(max_size=20))
def test_what_is_shown_of_an_address_ends_with_its_scheme(user, rest):
    assert PASSWORD not in shown(f"mongodb://{user}:{PASSWORD}{rest}")
    assert PASSWORD not in shown(f"{user}:{PASSWORD}{rest.replace('@', '')}@host")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_doctor_does_not_repeat_it(monkeypatch, variable, as_json):
    for uri in URIS:
        monkeypatch.setenv(variable, f"otel_retry,{uri}" if variable == VARIABLES[-1] else uri)
        done = CliRunner().invoke(cli, ["doctor", *(["--json"] if as_json else [])])
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert PASSWORD not in done.output


@pytest.mark.parametrize("uri", URIS)
def test_the_doctor_s_own_uri_is_not_repeated(uri, monkeypatch):
    monkeypatch.setattr("otel_retry.cli.doctor._WAIT_MS", 10)
    done = CliRunner().invoke(cli, ["doctor", "--json", "--uri", uri])

    assert PASSWORD not in done.output
    assert [each["state"] for each in json.loads(done.output) if each["what"] == "server"] == ["fail"]


@pytest.mark.parametrize("value", ["[/bold]", "[red]", "[", "\\[/]"])
def test_the_doctor_takes_signs_of_its_own_language_as_text(monkeypatch, value):
    monkeypatch.setenv("OTEL_RETRY_POLICY", value)
    done = CliRunner().invoke(cli, ["doctor"])

    assert isinstance(done.exception, SystemExit)
    assert value in done.output.replace("\\\\", "\\")


@pytest.mark.parametrize(
    "info", [{}, {"version": None}, {"version": "[/]" + "x" * 1000}, {"version": {"a": []}}], ids=str
)
def test_the_doctor_survives_a_server_that_answers_anything(server, info):
    server.always = {"buildInfo": info, "buildinfo": info}
    done = CliRunner().invoke(cli, ["doctor", "--uri", server.uri])

    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "server" in done.output
    assert "x" * 100 not in done.output


AUTHENTICATION = [
    {"saslStart": error(18, f"no user with {PASSWORD}")},
    {"saslStart": {"conversationId": 1, "done": False, "payload": b"r=x,s=QSXCR+Q6sek8bf92,i=4096"}},
]


@pytest.mark.parametrize("raw", [False, True])
async def test_a_client_that_logs_in_leaves_it_nowhere(watched, server, rig, logged, raw):
    """It cannot log in here: the server does not know the password either."""
    uri = server.uri.replace("mongodb://", f"mongodb://user:{PASSWORD}@")
    client = watched(
        uri,
        query_text_raw=raw,
        query_text_max_length=10_000,
        client_options={"serverSelectionTimeoutMS": 5000},
    )
    for script in AUTHENTICATION:
        server.always = script if raw is False else {"saslStart": error(18)}
        raised = await outcome(client.db.things.find_one, resolve)
        assert raised is not None
        assert PASSWORD not in "".join(describe(each) for each in otel_retry.attempts(raised))
    assert rig.operations
    assert where(PASSWORD, rig, logged) == []


@pytest.mark.parametrize(
    "command",
    [
        {"createUser": "u", "pwd": PASSWORD},
        {"updateUser": "u", "pwd": PASSWORD},
        {"saslStart": 1, "payload": PASSWORD},
    ],
    ids=str,
)
@pytest.mark.parametrize("reply", [{}, error(96)], ids=["done", "failed"])
async def test_a_command_that_carries_a_password_has_no_span(
    watched, server, rig, logged, command: dict[str, Any], reply
):
    server.always = {next(iter(command)): reply}
    client = watched(query_text_raw=True, query_text_max_length=10_000)
    await outcome(lambda: client.admin.command(command), resolve)

    assert rig.commands == []
    assert len(rig.operations) == 1
    assert rig.open == []
    assert where(PASSWORD, rig, logged) == []
