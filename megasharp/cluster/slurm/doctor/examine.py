"""`megasharp doctor` on one node: its checks, in order of what is needed first, then what nodes try together."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megasharp.cluster.slurm import ray_node
from megasharp.cluster.slurm.doctor.engines import Card, check_engines_python
from megasharp.cluster.slurm.doctor.filesystem import check_file_system, check_folders
from megasharp.cluster.slurm.doctor.findings import Engines, Finding, Patient, Place
from megasharp.cluster.slurm.doctor.gpu_state import check_gpus, read_gpus
from megasharp.cluster.slurm.doctor.host_memory import check_memory
from megasharp.cluster.slurm.doctor.meeting import Meeting, meet, try_shared_files
from megasharp.cluster.slurm.doctor.network import (
    chosen_variables,
    nccl_interfaces,
    nccl_sides,
    nccl_values,
    nccl_versions,
    port,
    try_all_reduce,
)
from megasharp.cluster.slurm.doctor.software import check_software
from megasharp.cluster.slurm.gpus import Node
from megasharp.common.errors import UserError
from megasharp.common.group_environment import adapters, shared_with_engines
from megasharp.rollout.sglang.client.launch import environment


def examine(patient: Patient) -> Iterator[Finding]:
    """Yield the findings of every check that applies, in order of what is needed first."""
    node, able = read_gpus(), True
    for finding in check_gpus(node, patient.gpus_per_node):
        able = able and finding.level != "FAIL"
        yield finding
    yield from check_software(patient)
    card: Card | None = None
    if patient.engines is not None:
        for found in check_engines_python(patient.engines, node, patient.gpus_per_node):
            if isinstance(found, Card):
                card = found
            else:
                yield found
    yield from check_memory(patient)
    yield from check_folders(patient)
    files = check_file_system(patient)
    yield files
    yield port()
    yield from _nccl(patient, card)
    if not able or files.level == "FAIL":
        able = False
        yield Finding("note", "all-reduce", "not tried, because of what failed above")
    if len(patient.place.nodes) > 1:
        yield from _together(patient, able, files.level != "FAIL", _alike(node, card))
    elif able:
        yield from try_all_reduce(patient)


def _together(patient: Patient, able: bool, writes: bool, values: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the nodes of a job find together; a node that is not able says so to the others."""
    if not writes:
        return
    try:
        meeting = Meeting(patient.place)
        apart = False
        for finding in meet(meeting, able, values):
            apart = apart or finding.level in ("FAIL", "note")
            # This node has said so above.
            if able or finding.level != "note":
                yield finding
        if apart:
            return
        yield from try_shared_files(meeting)
    except (UserError, OSError) as error:
        yield Finding("FAIL", "nodes", f"they cannot meet ({error}); set --runs to a folder that all nodes see")
        return
    yield from try_all_reduce(patient)


def _alike(node: Node | str, card: Card | None) -> dict[str, str]:
    """Return what should be the same on all nodes."""
    found = {"the trainer's torch": torch.__version__, **chosen_variables(os.environ)}
    if isinstance(node, Node):
        found["the driver"] = node.driver
    if card is not None:
        found["the engines' torch"] = card.torch
    return found


def _nccl(patient: Patient, card: Card | None) -> Iterator[Finding]:
    """Yield what is to be said of NCCL's variables and versions, on GPUs."""
    if not patient.gpus_per_node:
        return
    nodes, hcas = patient.nodes, adapters()
    ranks = chosen_variables(os.environ)
    yield from nccl_values(ranks, nodes, len(hcas))
    wrong = nccl_interfaces(ranks, [one.name for one in ray_node.interfaces()], nodes)
    if wrong is not None:
        yield wrong
    engines = patient.engines
    if engines is None:
        return
    yield nccl_sides(*_both_sides(engines), engines.one_group)
    if card is not None and card.nccl is not None and torch.version.cuda is not None:
        ours: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield nccl_versions(".".join(map(str, ours)), card.nccl, engines.one_group)


def _both_sides(engines: Engines) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that ranks and that engines get; SGLang sets some of its own."""
    settings = engines.settings
    of_engines = environment(settings, 0, os.environ, address="")
    of_engines |= shared_with_engines(settings.rollout.sglang, of_engines)
    return chosen_variables({**os.environ, **settings.variables}), chosen_variables(of_engines)


def name_of(place: Place) -> str:
    """Return this node's name: Slurm's, by which it can be excluded, or the machine's."""
    return place.nodes[place.node] if place.nodes else socket.gethostname()


def report(findings: Iterable[Finding], say: Callable[[str], None], name: str) -> bool:
    """Say each finding with the node's name, then a verdict; return True where none failed.

    A job's file reads the verdict: it names the nodes at fault, which can be replaced by others.
    """
    failed, warned, sick = 0, 0, set[str]()
    for finding in findings:
        say(f"{name}  {finding.level:4}  {finding.check}: {finding.text}")
        warned += finding.level == "warn"
        if finding.level == "FAIL":
            failed += 1
            sick |= {name} if finding.at_fault is None else set(finding.at_fault)
    if failed:
        blamed = f"; at fault: {', '.join(sorted(sick))}" if sick else ", of no one node"
        say(f"{name}  FAIL  verdict: {failed} check(s) failed{blamed}")
    else:
        say(f"{name}  ok    verdict: no check failed" + (f", {warned} warned" if warned else ""))
    return not failed


def across(names: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the srun command that runs a doctor on each node of this job."""
    return ["srun", f"--nodes={len(names)}", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", *command]


def node_names(listed: str) -> list[str]:
    """Return the names that `scontrol show hostnames` printed."""
    return re.findall(r"\S+", listed)
