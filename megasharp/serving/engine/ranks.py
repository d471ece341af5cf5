"""What every rank of an engine does must end the same on all of them: SGLang answers with what its first rank found."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megasharp.serving.engine.seams import get_parallel


def on_all_ranks(act: Callable[[], None]) -> None:
    """Have every rank act; where one of them refuses (ValueError, OSError), all raise its ValueError."""
    ranks = get_parallel()
    if ranks.tp_size == 1:
        act()
        return
    said: str | None = None
    try:
        act()
    except (ValueError, OSError) as error:
        said = str(error)
    found: list[str | None] = [None] * ranks.tp_size
    dist.all_gather_object(found, said, group=ranks.tp_group.cpu_group)
    for refusal in found:
        if refusal is not None:
            raise ValueError(refusal)
