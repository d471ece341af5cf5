"""Engines for an evaluation of their own: those of a run file, on this machine, with the weights of a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from megasharp.build.devices import check_names, gpus_here
from megasharp.build.engines import check_context, check_window, engines_on_a_node, fleet_settings
from megasharp.config.run import RunConfig
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.model_folder import model_folder
from megasharp.errors import UserError
from megasharp.protocols import Engine
from megasharp.serving.client.check import check_engines
from megasharp.serving.client.fleet import Fleet, FleetOptions
from megasharp.serving.client.launch import FleetSettings, launch
from megasharp.serving.client.router import RouterSettings
from megasharp.sync.fleet import FleetSync, make_transport
from megasharp.sync.settings import SyncSettings


class _Folder:
    """A Hugging Face folder as the learner's half of a weight sync."""

    def __init__(self, reader: HFReader) -> None:
        self._reader = reader

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the folder, one in memory at a time."""
        return ((name, self._reader.tensor(name)) for name in self._reader.names())


@contextmanager
def engines_of(config: RunConfig, where: str, folder: Path, logs: Path) -> Iterator[Engine]:
    """SGLang engines as `rollout` says, with the weights of `folder`; all that this machine has room for.

    Raises UserError for a run file without engines, and when they do not start.
    """
    if config.rollout.engine != "sglang":
        raise UserError(f"{where}: rollout.engine={config.rollout.engine} starts no engines; leave out --engines")
    settings = evaluation_settings(config, where, folder, logs)
    with HFReader(folder) as reader:
        check_context(config, reader.architecture.max_positions, where)
        check_window(config, reader.architecture.smallest_window, where)
        check_engines(settings, where)
        options = FleetOptions(router=RouterSettings(request_limit=config.rollout.request_limit_s))
        fleet = Fleet(launch(settings), settings, options)
        try:
            sync = SyncSettings("shared_memory", bucket_mb=config.sync.bucket_mb, verify=True)
            FleetSync(fleet, make_transport(fleet, sync)).push(_Folder(reader))
            yield fleet
        finally:
            fleet.close()


def evaluation_settings(config: RunConfig, where: str, folder: Path, logs: Path) -> FleetSettings:
    """On this machine alone, on all of its GPUs that this process may use."""
    settings, tp = fleet_settings(config, model_folder(folder), None, logs), config.rollout.tp
    gpus = gpus_here(config) if settings.device == "cuda" else []
    check_names(config, gpus)
    count = engines_on_a_node(config, where, len(gpus))
    each = [gpus[engine * tp : (engine + 1) * tp] for engine in range(count)] if gpus else ()
    return dataclasses.replace(settings, sleep=False, engines=count, gpus=each)
