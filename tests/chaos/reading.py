"""Reads the whole database in the end, by a plain client and past the proxies, into what the ledger judges."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gridfs import GridFSBucket
from pymongo import MongoClient
from pymongo.read_concern import ReadConcern

from tests.chaos.workload import ACCOUNTS, BALANCE, DATABASE, TICKETS, content

if TYPE_CHECKING:
    from tests.chaos.ledger import Found, Stream


def read(uri: str, streams: dict[str, Stream]) -> tuple[Found, set[str], list[str]]:
    """What was applied, the events that are there, and what else is wrong. Majority reads on the primary."""
    found: Found = {}
    wrong: list[str] = []

    def applied(stream: str, number: int, times: int = 1, place: str = "") -> None:
        found.setdefault(stream, {}).setdefault(place, Counter())[number] += times

    with MongoClient(uri) as client:
        database: Any = client.get_database(DATABASE, read_concern=ReadConcern("majority"))
        for document in database.writes.find({"s": {"$exists": True}}):
            applied(document["s"], document["n"])
        events = {f"{each['s']} {each['n']}" for each in database.events.find({"n": {"$exists": True}})}
        for document in database.events.find({"n": {"$exists": True}}):
            applied(document["s"], document["n"])
        for document in database.counters.find():
            if "n" in document:  # of a bulk write's insert
                applied(document["s"], document["n"])
                continue
            for number, times in document["o"].items():
                applied(document.get("s") or document["g"], int(number), times, document.get("place", ""))
        _read_tickets(database, streams, applied)
        balance = sum(each["balance"] for each in database.accounts.find())
        if balance != ACCOUNTS * BALANCE:
            wrong.append(f"the money is {balance}, not {ACCOUNTS * BALANCE}")
        bucket = GridFSBucket(database)
        for file in bucket.find({"filename": {"$ne": "first"}}):
            stream, _, number = file.filename.rpartition("/")
            applied(stream, int(number))
            if file.read() != content(file.filename):
                wrong.append(f"{file.filename} differs from what was uploaded")
    return found, events, wrong


def _read_tickets(database: Any, streams: dict[str, Stream], applied: Any) -> None:
    """A delete was applied if its document is gone."""
    left = {each["_id"] for each in database.tickets.find()}
    for name in streams:
        if name.endswith("/delete"):
            for number in range(TICKETS):
                if f"{name}/{number}" not in left:
                    applied(name, number)
