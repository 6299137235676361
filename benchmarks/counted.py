"""What runs under callgrind: one variant, its blocks of operations between marks that callgrind can see.

A mark is a call of `getppid`, which nothing else here makes; callgrind writes what it counted since the mark before
(`--dump-before=getppid`). Two blocks of different length are counted, so that what a block itself costs drops out.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from typing import TYPE_CHECKING

from benchmarks import callgrind
from benchmarks.floor import FLOORS
from benchmarks.variants import Unavailable
from benchmarks.workload import Bench, Load

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP, SHORT, LONG = 40, 20, 120
MARKS = 3
"""For each measured case: before the short block, between the two, after the long one."""

UNAVAILABLE = 77


def mark() -> None:
    os.getppid()


def count(block: Callable[[int], None], warm_up: int = WARM_UP) -> None:
    block(warm_up)
    callgrind.start()
    gc.collect()
    # When the collector runs depends on all that was allocated before: with it no two runs are the same.
    gc.disable()
    mark()
    block(SHORT)
    mark()
    block(LONG)
    mark()
    gc.enable()


def main(variant: str, cases: list[str]) -> None:
    if variant in FLOORS:
        block = FLOORS[variant]()
        count(block)
        os._exit(0)
    try:
        bench = Bench(variant)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        os._exit(UNAVAILABLE)
    for case in cases:
        load = Load.parse(case)
        # Each client and each collection has been used before.
        count(functools.partial(bench.run, load), max(WARM_UP, 2 * load.clients * load.collections))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
