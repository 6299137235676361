"""What a command says of itself: whether it may be shown, its collection, its session."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from otel_retry import semconv

_NEVER_SENSITIVE = semconv.COLLECTION_COMMANDS | {"getMore"}
"""Asked first: nearly all commands are of these, and a name that is spelled so needs no second look."""

_MOST_SESSIONS = 1000


def is_sensitive(name: str, command: Any) -> bool:
    """No span for these. PyMongo empties the command of a hello that carries credentials."""
    if name in _NEVER_SENSITIVE:
        return False
    lowered = name.lower()
    return lowered in semconv.SENSITIVE_COMMANDS or (not command and lowered in semconv.HELLO_COMMANDS)


def collection_of(name: str, database: str, command: Any) -> str | None:
    """The collection that a command names, for commands whose operation does not know it."""
    if database == "admin" or not (name in semconv.COLLECTION_COMMANDS or name == "getMore"):
        return None
    found = command.get("collection" if name == "getMore" else name)
    return found if isinstance(found, str) and not found.startswith("$cmd") else None


def session_id(lsid: Any) -> str | None:
    """The session's UUID as people write it; None where an application sent something else under that name."""
    value = lsid.get("id") if isinstance(lsid, Mapping) else None
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes) and len(value) == 16:
        return str(uuid.UUID(bytes=bytes(value)))
    return None


class SessionIds(dict[int, tuple[str | None, Any]]):
    """The texts of one client's session ids. PyMongo uses its sessions again and again, each with one document for its
    id: that document is the key, by identity, and is kept, so that its place in memory stays its own.
    """

    def text(self, lsid: Any) -> str | None:
        found = self.get(id(lsid))
        if found is None:
            if len(self) >= _MOST_SESSIONS:
                self.clear()
            found = self[id(lsid)] = (session_id(lsid), lsid)
        return found[0]
