"""Calls a function on a node of the cluster, outside the slots: for what must be looked at where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def there(node: str, limit_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What `function(*arguments)` returns on the node of that Ray ID; the function must be one of a module.

    Raises Ray's GetTimeoutError after `limit_s` seconds, and another RayError where the node is gone.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    return ray.get(task.remote(*arguments), timeout=limit_s)
