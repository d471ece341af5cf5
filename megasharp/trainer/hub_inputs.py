"""The models and data sets that a run reads of the hub: fetched before a job, and looked for where one is to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.run_folder import holds_no_run
from megasharp.cluster.slurm.doctor.findings import Finding
from megasharp.common.errors import NotAtHand, UserError
from megasharp.config.core import find
from megasharp.config.data import DataSource
from megasharp.config.hub import absence, cached_model, hub_is_off, is_hub_id, model_place
from megasharp.config.run_config import RunConfig
from megasharp.convert.hf_folder import HFReader, check_tokenizer, read_config
from megasharp.evals.suites import suite_source
from megasharp.tasks.sets.data_set import Source
from megasharp.tasks.sets.load import set_named
from megasharp.tasks.sets.row_sources import fetch_set, is_set_id, own_source
from megasharp.trainer.resolve.models import MEMORY_KEY, MODEL_KEY
from megasharp.trainer.resolve.recipes import build_recipes
from megasharp.trainer.resume import commits_of


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub that a configuration names, and the commit at which the run has begun, if it has."""

    key: str
    path: str
    revision: str | None
    commit: str | None
    weights: bool = True


@dataclass(frozen=True, slots=True)
class HubInputs:
    """All that a run reads of the hub."""

    models: tuple[HubModel, ...]
    sets: tuple[Source, ...]

    def __bool__(self) -> bool:
        return bool(self.models or self.sets)

    def fetch(self) -> None:
        """Bring into the hub's cache what it lacks. Raises UserError as `model_place`, and where a set is not had."""
        for model in self.models:
            model_place(model.path, model.revision, commit=model.commit, weights=model.weights)
        for source in self.sets:
            fetch_set(source)

    def look(self) -> Iterator[Finding]:
        """Yield what this machine's cache has of each. What it lacks is a failure only where the hub is off."""
        for model in self.models:
            yield _look(model)
        for source in self.sets:
            if hub_is_off():
                yield _look_offline(source)
            else:
                text = f"{source.hub}: of the hub, fetched where its cache lacks it (submit does that before a job)"
                yield Finding("note", "data", text)


def hub_inputs(config: RunConfig, where: str, root: Path, suites: Sequence[str] | None = None) -> HubInputs:
    """Return what a run with the folder `root` reads of the hub; `suites` None are the configuration's.

    Raises UserError for a recipe, a set or a suite that there is not.
    """
    commits = {} if holds_no_run(root) else commits_of(root, config)
    sources = [(each, find(each.path) if each.path else None) for each in config.data.sources]
    sources += [suite_source(name) for name in (config.eval.suites if suites is None else suites)]
    sets = dict.fromkeys(found for source, place in sources for found in sets_read(source, place))
    return HubInputs(tuple(_models(config, where, commits)), tuple(sets))


def _models(config: RunConfig, where: str, commits: Mapping[str, str]) -> Iterator[HubModel]:
    found = [HubModel(MODEL_KEY, config.model.path, config.model.revision, commits.get(MODEL_KEY))]
    memory = build_recipes(config, where).needs.memory
    if memory is not None:
        network = memory.network
        weights = network.start != "cold"
        found.append(HubModel(MEMORY_KEY, network.path, network.revision, commits.get(MEMORY_KEY), weights))
    return (each for each in found if is_hub_id(each.path) and not find(each.path).exists())


def sets_read(source: DataSource, place: Path | None) -> Iterator[Source]:
    """Yield the parts of a source, whose data is at `place` (None: at its set's own), that are read from the hub."""
    if place is None:
        parts = set_named(source.set).parts if source.set is not None else ()
        yield from (part.source for part in parts if part.source.hub)
    elif source.set is None and not place.exists() and is_set_id(str(place)):
        yield own_source(place, source.split, source.name, source.revision)


def _look(model: HubModel) -> Finding:
    folder = cached_model(model.path, model.commit or model.revision)
    at, lacks = f"{model.key} {model.path}", "the hub's cache does not have it"
    if folder is not None:
        at = f"{at} at commit {folder.name}"
        try:
            _check(folder, model.weights)
        except UserError as error:
            lacks = f"the hub's cache has a part of it ({error})"
        else:
            return Finding("ok", "model", f"{at}: in the hub's cache, {folder}")
    if hub_is_off():
        return Finding("FAIL", "model", f"{at}: {lacks}, and {absence()}")
    return Finding("note", "model", f"{at}: {lacks}; it would be downloaded (submit does that before a job)")


def _check(folder: Path, weights: bool) -> None:
    if weights:
        with HFReader(folder) as reader:
            check_tokenizer(folder, reader.architecture)
    else:
        check_tokenizer(folder, read_config(folder)[2])


def _look_offline(source: Source) -> Finding:
    try:
        fetch_set(source)
    except NotAtHand as absent:
        return Finding("FAIL", "data", str(absent))
    return Finding("ok", "data", f"{source.hub}: in the hub's cache")
