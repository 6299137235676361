"""The ledger of data: what was asked of the database, what it must hold in the end, and what it must not.

Writes come in streams of numbers, each stream of one worker, so that a million of them cost no more memory than the few
that failed. Pure: it is given what was found, and never reads a database.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WHOLE = ""
"""The only place of a write that changes one document."""

_SHOWN = 20


class Stream:
    """One worker's writes of one kind. Invariant: every number below `issued` was acknowledged, or is in `failed`.

    `places`: the documents that each write changes, if it changes several.
    """

    __slots__ = ("failed", "issued", "name", "places")

    def __init__(self, name: str, places: tuple[str, ...] = (WHOLE,)) -> None:
        self.name = name
        self.places = places
        self.issued = 0
        self.failed: set[int] = set()

    @contextlib.contextmanager
    def write(self) -> Iterator[int]:
        """Around one write: its number. What leaves with an error is not acknowledged, whatever became of it."""
        number = self.issued
        self.issued += 1
        try:
            yield number
        except BaseException:
            self.failed.add(number)
            raise


@dataclass(slots=True)
class Verdict:
    """Each entry names the write."""

    acknowledged: int = 0
    unacknowledged: int = 0
    applied_unacknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    """Found, though nobody asked for it."""

    def complaints(self) -> list[str]:
        return [
            f"{len(entries)} {what}: {', '.join(entries[:_SHOWN])}"
            for what, entries in (("lost", self.lost), ("doubled", self.doubled), ("phantom", self.phantom))
            if entries
        ]

    def add(self, other: Verdict) -> None:
        self.acknowledged += other.acknowledged
        self.unacknowledged += other.unacknowledged
        self.applied_unacknowledged += other.applied_unacknowledged
        self.lost += other.lost
        self.doubled += other.doubled
        self.phantom += other.phantom


Found = dict[str, dict[str, Counter[int]]]
"""Stream, place, number: how often that write was applied there."""


def judge(streams: Mapping[str, Stream], found: Found) -> Verdict:
    """Every acknowledged write is there exactly once in each of its places, every other one at most once."""
    verdict = Verdict()
    for name, stream in streams.items():
        verdict.acknowledged += stream.issued - len(stream.failed)
        verdict.unacknowledged += len(stream.failed)
        places = found.get(name, {})
        for place in stream.places:
            times = places.get(place, Counter())
            for number in range(stream.issued):
                applied = times[number]
                label = f"{name} {number}" + (f" in {place}" if place else "")
                if applied > 1:
                    verdict.doubled.append(f"{label} ({applied} times)")
                elif not applied and number not in stream.failed:
                    verdict.lost.append(label)
            verdict.phantom += [f"{name} {number}" for number in times if not 0 <= number < stream.issued]
        verdict.applied_unacknowledged += sum(
            any(places.get(place, Counter())[number] for place in stream.places) for number in stream.failed
        )
        verdict.phantom += [f"{name} in {place}" for place in places if place not in stream.places]
    verdict.phantom += [f"{name}: no such stream" for name in found if name not in streams]
    return verdict


def judge_events(inserted: set[str], seen: Counter[str], consumer: str) -> Verdict:
    """A consumer of a change stream sees each document that is there once, and none that is not."""
    return Verdict(
        lost=[f"{consumer}: event {key}" for key in sorted(inserted) if not seen[key]],
        doubled=[f"{consumer}: event {key} ({times} times)" for key, times in seen.items() if times > 1],
        phantom=[f"{consumer}: event {key}" for key in seen if key not in inserted],
    )
