"""A finding, and the expectations of a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasharp.config.policy import AttentionName, Wanted
from megasharp.rollout.sglang.client.launch import FleetSettings

# `warn` is slower, or less safe, than it could be; only FAIL keeps a run from its start.
Level = Literal["ok", "note", "warn", "FAIL"]
GB = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check; a warning's and a failure's text ends with the remedy.

    `at_fault`: the nodes that a failure is of; None is the node itself, () none that could be named.
    """

    level: Level
    check: str
    text: str
    at_fault: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """This node, number `node` of `nodes`; `meeting` is a folder that all of them see, None where it is alone."""

    meeting: Path | None = None
    node: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engines:
    """A run's engines. `at_hand`: their model is here, so that their keys can be compared with it.

    `one_group`: they receive weights in one NCCL group with the policy's ranks. `where` names the run file.
    """

    settings: FleetSettings
    where: str
    at_hand: bool
    one_group: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a run asks of a node, in bytes, by its plan.

    `host` is what is offloaded to it. `processes` hold weights and CUDA contexts beside that. `shared` is of /dev/shm,
    for Ray's smallest object store and for buckets of weights; a store for whole steps wants `store` of it.
    """

    host: int = 0
    processes: int = 0
    shared: int = 0
    store: int = 0


@dataclass(frozen=True, slots=True)
class Patient:
    """The expectations of a node. Without a run file they are this machine's software alone.

    `folders` must be seen, and `inputs` says what was found of the hub's models and data; checkpoints of `checkpoint`
    bytes go to `run`, and `whole` bytes are there at its end. `limits` are the time limits that the run would meet by
    its plan, in words. The run asks for `run_nodes` nodes.
    """

    gpus_per_node: int = 0
    folders: tuple[str, ...] = ()
    inputs: tuple[Finding, ...] = ()
    run: Path | None = None
    checkpoint: int = 0
    whole: int = 0
    limits: tuple[str, ...] = ()
    constraints: str = ""
    transformer_engine: Wanted = "auto"
    attention: AttentionName = "auto"
    engines: Engines | None = None
    memory: Memory = Memory()
    place: Place = Place()
    run_nodes: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes between which data is to go: the run's, or those of this job."""
        return max(self.run_nodes, len(self.place.nodes))


def size_text(count: float) -> str:
    """Return bytes as text in which a small model's are not 0.0."""
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / 1e6:.1f} MB"
