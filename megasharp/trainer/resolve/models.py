"""The inputs of a run: its models, checked before anything starts, and its training problems."""

from __future__ import annotations

from dataclasses import replace

from megasharp.checkpoint.manifest import MANIFEST
from megasharp.checkpoint.store import CheckpointStore
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.config.core import find
from megasharp.config.data import DataSource
from megasharp.config.hub import hub_model, model_place
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import HFReader, check_tokenizer, read_config
from megasharp.convert.lora import recorded_adapters
from megasharp.convert.model_folder import CONFIG_FILE, ModelFolder, is_part, model_folder, what_it_is
from megasharp.evals.suites import suite_source
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.own_reward import is_own
from megasharp.tasks.problems import load_problems, prompt_of, task_of
from megasharp.tasks.stream import sampled
from megasharp.tasks.table import row_of
from megasharp.trainer.reward_judge import training_items


def check_named(config: RunConfig, where: str) -> None:
    """Refuse a task, a set or a suite that there is not, before a model is fetched for it. Raises UserError."""
    try:
        for source in config.data.sources:
            task = task_of(source)
            if not is_own(task):
                row_of(task)
        for name in config.eval.suites:
            suite_source(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def training_problems(config: RunConfig, where: str) -> list[TaskItem]:
    """Read all problems, in their own order, to be judged as the run's rewards say; `where` names its file.

    Those of a mixture follow each other by source. Each is named after its source, which is its `source` then too.
    Raises UserError in one line.
    """
    if not config.data.mix:
        return training_items(source_problems(config.data, f"{where}: data"), config.reward, where)
    found: list[TaskItem] = []
    for source in config.data.mix:
        name = source.own_name
        rows = source_problems(source, f"{where}: data.mix: {name}")
        if source.size is not None and source.size > len(rows):
            raise UserError(f"{where}: data.mix: {name}: size={source.size} of {len(rows)} problems; lower it")
        items = training_items(sampled(rows, source.size, config.seed), config.reward, where, source)
        found += [replace(item, id=f"{name}/{item.id}", source=name) for item in items]
    return found


def source_problems(source: DataSource, key: str) -> list[TaskItem]:
    """Read all problems of one source; `key` is the file and the key that name it. Raises UserError in one line."""
    if source.set is None and source.path is None:
        raise UserError(f"{key}.path: name a data file of task {source.task!r}")
    return load_problems(source, find(source.path) if source.path is not None else None, prompt_of(source))


# The keys by which a checkpoint records at which commit a model of the hub was taken.
MODEL_KEY, MEMORY_KEY = "model.path", "recipe.dlc.memory.path"
# And a set of the hub, where there is one source.
DATA_KEY = "data.path"
# The part of a run's checkpoint that is a Megatron folder of its memory network.
MEMORY_PART = "memory"


def open_model(
    path: str, revision: str | None = None, commit: str | None = None, weights: bool = True
) -> tuple[ModelFolder, Architecture]:
    """Open the model that a configuration names; every tensor's name and shape, and the tokenizer, are checked.

    Without `weights`, the hub's weights that the cache does not have are neither fetched nor checked.

    Raises:
        UserError: there is no model, it is damaged or not supported, or its weights have adapters beside them.
    """
    folder = model_folder(model_place(path, revision, commit=commit, weights=weights, check=read_config))
    if not weights and hub_model(folder.path) is not None and not folder.serves:
        return _described(folder)
    if not folder.is_megatron and (is_part(folder.path) or not (folder.path / CONFIG_FILE).is_file()):
        kinds = "Hugging Face's, one that `megasharp convert hf-to-megatron` made, or a run's checkpoint"
        raise UserError(f"{folder.path} is no model's folder ({kinds}){what_it_is(folder.path)}")
    if folder.is_megatron:
        if recorded_adapters(folder.path / "policy") is not None:
            raise UserError(
                f"{folder.path} holds adapters beside frozen weights: merge them with `megasharp convert "
                f"megatron-to-hf {folder.path} FOLDER` and name that folder"
            )
        # Imported here: Megatron takes seconds to import.
        from megasharp.learner.conversion import MegatronWeights
        from megasharp.learner.weights import check_beside_shards

        architecture = MegatronWeights(folder.path).architecture
        check_beside_shards(folder.path / "policy")
    else:
        with HFReader(folder.path) as reader:
            architecture = reader.architecture
    check_tokenizer(folder.description, architecture)
    return folder, architecture


def _described(folder: ModelFolder) -> tuple[ModelFolder, Architecture]:
    """Open the config.json and the tokenizer of a folder that needs no weights."""
    _, _, architecture = read_config(folder.description)
    check_tokenizer(folder.description, architecture)
    return folder, architecture


def memory_path(path: str) -> str:
    """Return the memory network's folder: in a checkpoint of a run with a memory network, that network's.

    Raises:
        UserError: an older version saved it without its config.json.
    """
    checkpoint = find(path)
    part = checkpoint / MEMORY_PART
    if not (model_folder(checkpoint).is_megatron and part.is_dir()):
        return path
    if not (part / "hf").is_dir():
        raise UserError(
            f"{part} holds a memory network without its config.json ({checkpoint / 'hf'} is the policy's), an older "
            "version saved it: resume its run for a checkpoint with it, or have the policy of this one by "
            f"`megasharp convert megatron-to-hf {checkpoint} FOLDER`"
        )
    return str(part)


def open_memory(
    path: str, cold: bool = False, revision: str | None = None, commit: str | None = None, weights: bool = True
) -> tuple[ModelFolder, Architecture]:
    """Open a memory network as `open_model` does; a note says which network of a run's checkpoint it is.

    Of a `cold` one, config.json and the tokenizer are all that is read, so its folder needs no weights.

    Raises:
        UserError: as `open_model` and `memory_path`.
    """
    chosen = memory_path(path)
    if cold:
        return _described(model_folder(model_place(chosen, revision, commit=commit, weights=False)))
    checkpoint = find(path)
    found = open_model(chosen, revision, commit, weights)
    if chosen != path:
        note(f"the memory network begins with that of {checkpoint}: {chosen}")
    elif (checkpoint / MANIFEST).is_file():
        note(f"the memory network begins with the policy of {checkpoint}, which has no memory network")
    return found


def check_content(folder: ModelFolder) -> None:
    """Read Megatron weights whole and compare them with the record of hashes that was written with them.

    Weights without a record, such as Hugging Face's folders, are not compared.

    Raises:
        UserError: they differ from what was written.
    """
    if not folder.is_megatron:
        return
    for checkpoint in (folder.path, folder.path.parent):
        if (checkpoint / MANIFEST).is_file():
            problem = CheckpointStore.problem(checkpoint)
            if problem is not None:
                raise UserError(f"{problem}: name another checkpoint as the model")
            return
    from megasharp.learner.conversion import MegatronWeights

    for _ in MegatronWeights(folder.path, noted=True).tensors():
        pass
