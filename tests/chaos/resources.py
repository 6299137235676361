"""Threads, file descriptors and memory of this process, over the run and after it."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEGABYTE = 1 << 20
_BLOCKS = 5
_FEWEST_SAMPLES = 40
_GROWTH = 0.05
_SLACK = 8.0
"""Megabytes: pools, sessions and the allocator's arenas come and go with the faults."""


@dataclass(frozen=True, slots=True)
class Sample:
    threads: int
    descriptors: int
    megabytes: float


def sample() -> Sample:
    return Sample(
        threads=threading.active_count(),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        megabytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / _MEGABYTE,
    )


@dataclass(slots=True)
class Resources:
    """`before` is taken before the first client is made; `after` when all are closed."""

    before: Sample = field(default_factory=sample)
    over_time: list[Sample] = field(default_factory=list)
    after: Sample | None = None

    def settle(self, *, timeout: float = 60.0) -> None:
        """Closed clients' threads end a little later: wait for them, and only a leak takes the whole time."""
        deadline = time.monotonic() + timeout
        while True:
            gc.collect()
            self.after = sample()
            settled = (
                self.after.threads <= self.before.threads
                and self.after.descriptors <= self.before.descriptors
            )
            if settled or time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def judge(self) -> list[str]:
        complaints = []
        after = self.after or sample()
        if after.threads > self.before.threads:
            names = ", ".join(sorted(thread.name for thread in threading.enumerate()))
            complaints.append(f"{after.threads} threads, {self.before.threads} before: {names}")
        if after.descriptors > self.before.descriptors:
            complaints.append(f"{after.descriptors} file descriptors, {self.before.descriptors} before")
        return complaints + judge_memory([each.megabytes for each in self.over_time])


def judge_memory(megabytes: list[float]) -> list[str]:
    """Flat, judged over blocks: one moment may be that of a big reply. The first block is the warm-up."""
    if len(megabytes) < _FEWEST_SAMPLES:
        return []
    size = len(megabytes) // _BLOCKS
    blocks = [statistics.median(megabytes[start : start + size]) for start in range(0, size * _BLOCKS, size)]
    early, late = min(blocks[1:3]), min(blocks[-2:])
    if late > early * (1 + _GROWTH) + _SLACK:
        return [f"memory grew: {', '.join(f'{block:.0f}' for block in blocks)} MB"]
    return []
