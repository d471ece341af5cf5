"""A reward that waits for something else: up to `reward.concurrency` calls are under way at once."""

import asyncio


async def correct(text: str, answer: str) -> float:
    """1 where the answer is the last word. A judge over HTTP would be asked where this sleeps."""
    await asyncio.sleep(0.01)
    return float(text.split()[-1:] == [str(answer)])
