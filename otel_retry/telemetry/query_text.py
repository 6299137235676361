"""`db.query.text`: a command as relaxed Extended JSON, of bounded length, without the user's values.

The writer stops as soon as the limit is passed, so a command of sixteen megabytes costs no more than a short one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.raw_bson import RawBSONDocument

from otel_retry.semconv import COLLECTION_COMMANDS

_RAW = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)

LEFT_OUT = frozenset({"lsid", "$db", "$clusterTime", "signature"})

_DEEPEST = 100


class _Full(Exception):  # noqa: N818 - not an error: the text is long enough
    pass


def query_text(command: Mapping[str, Any], *, limit: int, raw: bool) -> str:
    """At most `limit` characters. Unless `raw`, every value but the collection's name is replaced by `?`."""
    writer = _Writer(limit, raw=raw)
    try:
        writer.command(command)
    except _Full:
        pass
    except Exception as error:  # a value of a type that nobody expected: its text is not worth an error
        writer.parts.append(f"<{type(error).__name__}>")
    return "".join(writer.parts)[:limit]


class _Writer:
    def __init__(self, limit: int, *, raw: bool) -> None:
        self.parts: list[str] = []
        self._room = limit
        self._raw = raw

    def put(self, text: str) -> None:
        self.parts.append(text)
        self._room -= len(text)
        if self._room <= 0:
            raise _Full

    def command(self, command: Mapping[str, Any]) -> None:
        self.put("{")
        first = True
        for key in command:
            if key in LEFT_OUT:
                continue
            self._key(key, first=first)
            if first and key in COLLECTION_COMMANDS and isinstance(command[key], str):
                self.put(json.dumps(command[key]))  # the collection: part of the span's name already
            else:
                self.value(command[key], 0)
            first = False
        self.put("}")

    def value(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            self.put('"..."')
        elif isinstance(value, Mapping) and not isinstance(value, RawBSONDocument):
            self._mapping(value, depth)
        elif isinstance(value, RawBSONDocument):
            self._mapping(dict(value.items()), depth)
        elif isinstance(value, (list, tuple)):
            self._array(value, depth)
        elif self._raw:
            if isinstance(value, (str, bytes)) and len(value) > self._room:
                value = value[: self._room]  # the rest would be cut off anyway
            self.put(json_util.dumps(value, json_options=_RAW))
        else:
            self.put('"?"')

    def _key(self, key: Any, *, first: bool) -> None:
        self.put(("" if first else ", ") + json.dumps(str(key)) + ": ")

    def _mapping(self, document: Mapping[str, Any], depth: int) -> None:
        self.put("{")
        for index, key in enumerate(document):
            self._key(key, first=index == 0)
            self.value(document[key], depth + 1)
        self.put("}")

    def _array(self, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        self.put("[")
        for index, item in enumerate(items):
            if index:
                self.put(", ")
            self.value(item, depth + 1)
            if not self._raw and not isinstance(item, (Mapping, list, tuple)):
                break  # one `?` says as much as a thousand
        self.put("]")
