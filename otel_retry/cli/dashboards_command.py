"""`otel-retry dashboards`: the shipped dashboards and rules, written to a folder or sent to a Grafana."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click

from otel_retry import dashboards as shipped
from otel_retry.version import __version__

_TIMEOUT = 30.0
_MOST_FOLDERS = 1000


@click.group()
def dashboards() -> None:
    """Grafana dashboards, Prometheus recording rules and alerts."""


@dashboards.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def export(directory: Path) -> None:
    r"""Write the dashboards and the rules into DIR, over older ones of the same names.

    \b
    otel-retry dashboards export /etc/grafana/dashboards    for a provider of type file
    otel-retry dashboards export /etc/prometheus/mongodb    for rule_files: [mongodb/*.yaml]
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in shipped.FILES:
            path = directory / name
            path.write_text(shipped.read(name), encoding="utf-8")
            click.echo(path)
    except OSError as error:
        raise click.ClickException(f"{error.filename or directory}: {error.strerror or error}") from None


@dashboards.command()
@click.option(
    "--grafana",
    "url",
    required=True,
    envvar="GRAFANA_URL",
    show_envvar=True,
    metavar="URL",
    help="Grafana's address, as in a browser.",
)
@click.option(
    "--token",
    required=True,
    envvar="GRAFANA_TOKEN",
    show_envvar=True,
    help="Of a service account that may write dashboards. In the environment it stays out of `ps`.",
)
@click.option("--folder", help="The title of a folder; it is made if there is none. Otherwise: no folder.")
def push(url: str, token: str, folder: str | None) -> None:
    r"""Send the dashboards to a Grafana, over older versions of the same ones.

    The rules are Prometheus' business: see `export`.

    \b
    GRAFANA_TOKEN=... otel-retry dashboards push --grafana https://grafana.example.com --folder MongoDB
    """
    grafana = Grafana(url, token)
    uid = grafana.folder(folder) if folder else ""
    for name in shipped.DASHBOARDS:
        where = grafana.save(json.loads(shipped.read(name)), folder=uid)
        click.echo(f"{name} → {where}")


class Grafana:
    """Grafana's HTTP API, as far as it is needed. What goes wrong is said in a sentence, never with the token in it."""

    def __init__(self, url: str, token: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise click.BadParameter(
                "give an address such as https://grafana.example.com", param_hint="--grafana"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise click.BadParameter(
                "give the bare address, without user, query or fragment", param_hint="--grafana"
            )
        self._token = token.strip()
        if not self._token or not self._token.isascii() or not self._token.isprintable():
            raise click.BadParameter(
                "that is no token: it is empty or has unprintable characters", param_hint="--token"
            )
        self.url = url.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirect)

    def folder(self, title: str) -> str:
        """The uid of the folder with this title."""
        found = self._ask("GET", f"/api/folders?limit={_MOST_FOLDERS}")
        for each in found if isinstance(found, list) else []:
            if isinstance(each, dict) and each.get("title") == title:
                return str(each.get("uid", ""))
        made = self._ask("POST", "/api/folders", {"title": title})
        return str(made.get("uid", "")) if isinstance(made, dict) else ""

    def save(self, dashboard: dict[str, Any], *, folder: str) -> str:
        """Over an older one with the same uid; answers with its address."""
        answer = self._ask(
            "POST",
            "/api/dashboards/db",
            {
                "dashboard": {**dashboard, "id": None},
                "folderUid": folder,
                "overwrite": True,
                "message": f"otel-retry {__version__}",
            },
        )
        path = str(answer.get("url", "")) if isinstance(answer, dict) else ""
        # The path has Grafana's sub-path in it already, if it is served under one.
        return urllib.parse.urljoin(self.url, path) if path else self.url

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  # __init__ lets http and https through, nothing else
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
                "Accept": "application/json",
            },
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                text = response.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                raise self._complaint(_refusal(error)) from None
        except urllib.error.URLError as error:
            raise self._complaint(f"no answer: {error.reason}") from None
        except (OSError, HTTPException) as error:
            raise self._complaint(f"no answer: {error or type(error).__name__}") from None
        try:
            return json.loads(text)
        except ValueError:
            raise self._complaint(f"the answer to {method} {path} is no JSON; is it a Grafana?") from None

    def _complaint(self, text: str) -> click.ClickException:
        return click.ClickException(f"{self.url}: {text}".replace(self._token, "***"))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token along to wherever it points."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _refusal(error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        target = error.headers.get("Location", "another address")
        return f"it redirects to {target}; give the address that it really has"
    said = _message(error)
    hint = {
        401: "the token is unknown or has expired",
        403: "the token's service account may not do this; it needs the role Editor",
        404: "no such API; is the address right, with its sub-path if it has one?",
        412: "Grafana has something else under this name; rename or move it",
    }.get(error.code, "")
    return f"{error.code} {error.reason}" + "".join(f": {part}" for part in (said, hint) if part)


def _message(error: urllib.error.HTTPError) -> str:
    """Grafana's own words, if it has any."""
    try:
        answer = json.loads(error.read(65536))
    except (ValueError, OSError, HTTPException):
        return ""
    return str(answer.get("message", ""))[:500] if isinstance(answer, dict) else ""
