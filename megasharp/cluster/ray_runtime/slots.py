"""Slots that Ray holds for us: one strictly packed placement group per node of the layout."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megasharp.cluster.ray_runtime.process_environment import usable
from megasharp.cluster.ray_runtime.slot_layout import Layout
from megasharp.common.errors import RunFailed, UserError
from megasharp.common.group_environment import compute_capability

_WHOLE = 1.0
# A rank and an engine share a slot in turn; Ray has to find both places free at once.
_SHARED = 0.5


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a slot: its node's address in the cluster, its GPU there and that one's compute capability.

    Both are None on a CPU.
    """

    node: str
    gpu: str | None = None
    capability: tuple[int, int] | None = None


class Slots:
    """A layout with a seat for each slot. Closing it gives the slots back and ends the actors that sit in them."""

    def __init__(self, layout: Layout, groups: Sequence[Any], seats: Sequence[Seat]) -> None:
        self.layout = layout
        self.seats = tuple(seats)
        self._groups = list(groups)

    def actor(self, kind: type, slot: int, *args: object, variables: Mapping[str, str] = MappingProxyType({})) -> Any:
        """Start an actor of class `kind` in a slot; return Ray's handle at once.

        `variables` are in its environment before it imports anything.
        """
        import ray

        options = _options(self.layout, self._groups, slot)
        if variables:
            options["runtime_env"] = {"env_vars": dict(variables)}
        return ray.remote(kind).options(max_restarts=0, **options).remote(*args)

    def close(self) -> None:
        """Give the slots back; harmless when that has happened."""
        groups, self._groups = self._groups, []
        _remove(groups)


def reserve(layout: Layout, limit_s: float) -> Slots:
    """Reserve all slots of the connected Ray within `limit_s`. Raises RunFailed, with none reserved, otherwise."""
    from ray.util import placement_group

    deadline = time.monotonic() + limit_s
    groups = []
    try:
        for slots in layout.nodes:
            groups.append(placement_group([layout.bundle] * len(slots), strategy="STRICT_PACK"))
        for number, group in enumerate(groups):
            if not group.wait(max(0.1, deadline - time.monotonic())):
                raise RunFailed(
                    f"Ray did not reserve {len(layout.nodes[number])} slots on one node within {limit_s:g} s (group "
                    f"{number + 1} of {len(groups)}); another run may have taken them"
                )
        return Slots(layout, groups, _seats(layout, groups, deadline))
    except BaseException:
        _remove(groups)
        raise


def end_actors(actors: Sequence[Any], limit_s: float = 20.0) -> None:
    """Kill the actors' processes and wait until Ray knows them dead; nothing to do where they, or Ray, are gone."""
    import ray

    if not usable():
        return
    for actor in actors:
        ray.kill(actor, no_restart=True)
    last = [actor.__ray_ready__.remote() for actor in actors]
    if last:
        ray.wait(last, num_returns=len(last), timeout=limit_s)


def _options(layout: Layout, groups: Sequence[Any], slot: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, index = _bundle(layout, slot)
    both = layout.slots[slot].rank is not None and layout.slots[slot].engine is not None
    share = _SHARED if both else _WHOLE
    return {
        "num_cpus": layout.cpus * share,
        "num_gpus": share if layout.gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(groups[group], placement_group_bundle_index=index),
    }


def _bundle(layout: Layout, slot: int) -> tuple[int, int]:
    """Find a slot's group and its bundle there."""
    return next((group, slots.index(slot)) for group, slots in enumerate(layout.nodes) if slot in slots)


def _seats(layout: Layout, groups: Sequence[Any], deadline: float) -> list[Seat]:
    from ray.util import placement_group_table

    ray: Any = importlib.import_module("ray")
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    places = [_bundle(layout, slot) for slot in range(len(layout.slots))]
    here: Sequence[_Gpu] = _gpus(layout, groups, deadline) if layout.gpu else [(None, None)] * len(places)
    return [Seat(addresses[nodes[group][index]], *gpu) for (group, index), gpu in zip(places, here, strict=True)]


_Gpu = tuple[str | None, tuple[int, int] | None]


def _gpus(layout: Layout, groups: Sequence[Any], deadline: float) -> list[_Gpu]:
    """Ask in every slot: an engine's process needs the GPUs of slots that its actor does not sit in."""
    import ray

    ask = ray.remote(_gpu_here)
    refs = [ask.options(**_options(layout, groups, slot)).remote() for slot in range(len(layout.slots))]
    try:
        gpus: list[_Gpu] = ray.get(refs, timeout=max(1.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise RunFailed("Ray's nodes did not say in time which GPUs they gave us; look at `ray status`") from error
    if not all(name is not None and name.isdecimal() for name, _ in gpus):
        raise UserError("Ray names its GPUs by UUID; start its nodes with CUDA_VISIBLE_DEVICES unset or as numbers")
    return gpus


def _gpu_here() -> _Gpu:
    import ray

    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0]), compute_capability()


def _remove(groups: Sequence[Any]) -> None:
    from ray.util import remove_placement_group

    if usable():
        for group in groups:
            remove_placement_group(group)
