"""How the loops wait. Looked up at call time: gevent replaces `time.sleep`, and tests replace these."""

from __future__ import annotations

import asyncio
import time


def sleep(seconds: float) -> None:
    time.sleep(seconds)


async def sleep_async(seconds: float) -> None:
    await asyncio.sleep(seconds)
