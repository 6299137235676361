"""`otel-retry dashboards`, against a small Grafana of our own."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from otel_retry import dashboards as shipped
from otel_retry.cli.dashboards_command import dashboards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "glsa_secret_0123456789"


class FakeGrafana(ThreadingHTTPServer):
    """Keeps folders and dashboards; `status` makes it refuse everything, as it would."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders: list[dict[str, str]] = [{"uid": "f1", "title": "Old"}]
        self.saved: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeGrafana

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked: Any) -> None:
        grafana = self.server
        grafana.tokens.append(self.headers["Authorization"])
        content = grafana.body if grafana.body is not None else json.dumps(self.reply(asked)).encode()
        self.send_response(grafana.status)
        for name, value in grafana.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def reply(self, asked: Any) -> Any:
        grafana = self.server
        if grafana.status != 200:
            # Some proxies repeat what they were sent.
            return {"message": f"refused, you sent {self.headers['Authorization']}"}
        if self.path.startswith("/api/folders"):
            if asked is None:
                return grafana.folders
            grafana.folders.append({"uid": f"f{len(grafana.folders) + 1}", **asked})
            return grafana.folders[-1]
        assert self.path == "/api/dashboards/db"
        grafana.saved.append(asked)
        return {"status": "success", "url": f"/d/{asked['dashboard']['uid']}/x"}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def call(*arguments: str, env: dict[str, str] | None = None) -> Any:
    """No error is shown as a stack trace, and none shows the token."""
    result = CliRunner().invoke(dashboards, arguments, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert TOKEN not in result.output
    return result


def push(grafana: FakeGrafana, *arguments: str) -> Any:
    return call("push", "--grafana", grafana.url, "--token", TOKEN, *arguments)


def test_export_writes_what_is_shipped(tmp_path: Path) -> None:
    result = call("export", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0
    written = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert written == {name: shipped.read(name) for name in shipped.FILES}
    assert result.output.splitlines() == [str(tmp_path / "new" / "folder" / name) for name in shipped.FILES]


def test_export_replaces_older_files_and_leaves_others_alone(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text("old")
    (tmp_path / "mine.yaml").write_text("mine")
    assert call("export", str(tmp_path)).exit_code == 0
    assert (tmp_path / "alerts.yaml").read_text() == shipped.read("alerts.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_export_to_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("export", str(tmp_path / "file" / "below"))
    assert result.exit_code == 1
    assert "Not a directory" in result.output


def test_push_sends_every_dashboard_over_the_older_one(grafana: FakeGrafana) -> None:
    result = push(grafana)
    assert result.exit_code == 0
    assert [each["dashboard"] for each in grafana.saved] == [
        {**json.loads(shipped.read(name)), "id": None} for name in shipped.DASHBOARDS
    ]
    assert all(each["overwrite"] is True and each["folderUid"] == "" for each in grafana.saved)
    assert set(grafana.tokens) == {f"Bearer {TOKEN}"}
    assert f"retries.json → {grafana.url}/d/otel-retry-retries/x" in result.output


def test_push_finds_the_folder_by_its_title(grafana: FakeGrafana) -> None:
    assert push(grafana, "--folder", "Old").exit_code == 0
    assert {each["folderUid"] for each in grafana.saved} == {"f1"}
    assert len(grafana.folders) == 1


def test_push_makes_a_folder_that_is_not_there(grafana: FakeGrafana) -> None:
    assert push(grafana, "--folder", "New").exit_code == 0
    assert grafana.folders[-1] == {"uid": "f2", "title": "New"}
    assert {each["folderUid"] for each in grafana.saved} == {"f2"}


def test_the_token_and_the_address_may_come_from_the_environment(grafana: FakeGrafana) -> None:
    assert call("push", env={"GRAFANA_TOKEN": TOKEN, "GRAFANA_URL": grafana.url + "/"}).exit_code == 0
    assert set(grafana.tokens) == {f"Bearer {TOKEN}"}


def test_without_a_token_it_says_where_one_may_stand(grafana: FakeGrafana) -> None:
    result = call("push", "--grafana", grafana.url, env={"GRAFANA_TOKEN": None})
    assert result.exit_code == 2
    assert "--token" in result.output
    assert "GRAFANA_TOKEN" in result.output
    assert not grafana.tokens


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "unknown or has expired"),
        (403, "role Editor"),
        (404, "is the address right"),
        (412, "rename or move it"),
        (500, "500 Internal Server Error: refused"),
    ],
)
def test_a_refusal_is_told_in_a_sentence(grafana: FakeGrafana, status: int, says: str) -> None:
    grafana.status = status
    result = push(grafana)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {grafana.url}: {status} ")
    assert says in result.output
    assert "***" in result.output


def test_a_redirect_does_not_get_the_token(grafana: FakeGrafana) -> None:
    grafana.status, grafana.headers = 302, {"Location": f"{grafana.url}/elsewhere"}
    result = push(grafana)
    assert result.exit_code == 1
    assert "redirects to" in result.output
    assert len(grafana.tokens) == 1


def test_what_is_no_grafana_is_recognised(grafana: FakeGrafana) -> None:
    grafana.body = b"<html>Welcome</html>"
    result = push(grafana)
    assert result.exit_code == 1
    assert "is it a Grafana?" in result.output


def test_an_error_without_json_is_told_all_the_same(grafana: FakeGrafana) -> None:
    grafana.status, grafana.body = 502, b"<html>Bad Gateway</html>"
    result = push(grafana)
    assert (result.exit_code, result.output) == (1, f"Error: {grafana.url}: 502 Bad Gateway\n")


def test_nobody_at_the_address(grafana: FakeGrafana) -> None:
    url = grafana.url
    grafana.server_close()
    result = call("push", "--grafana", url, "--token", TOKEN)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {url}: no answer: ")


@pytest.mark.parametrize(
    "url",
    [
        "grafana",
        "ftp://grafana",
        "file:///etc/passwd",
        "http://",
        "http://me:secret@grafana",
        "http://g/?a=1",
    ],
)
def test_an_address_that_is_none_is_a_wrong_call(url: str) -> None:
    result = call("push", "--grafana", url, "--token", TOKEN)
    assert result.exit_code == 2
    assert "--grafana" in result.output


@pytest.mark.parametrize("token", ["", "  ", "glsa\nX-Evil: 1", "schlüssel"])
def test_a_token_that_is_none_is_a_wrong_call(grafana: FakeGrafana, token: str) -> None:
    result = call("push", "--grafana", grafana.url, "--token", token)
    assert result.exit_code == 2
    assert "token" in result.output
    assert not grafana.tokens
