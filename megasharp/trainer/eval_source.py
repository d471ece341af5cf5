"""The weights that an evaluation measures, and engines that sample from them.

`megasharp eval` measures a run's newest checkpoint, a checkpoint, or a Hugging Face folder, in the engine of this
process or in a run file's SGLang engines. `megasharp probe`, and a run at every evaluation, have weights score a fixed
set of responses.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.run_folder import stored_config
from megasharp.checkpoint.store import CheckpointStore
from megasharp.common import signals
from megasharp.common.errors import UserError
from megasharp.common.files import Scratch, write_like
from megasharp.common.formats import NewerFormat
from megasharp.config.core import validate
from megasharp.config.hub import hub_model, model_place
from megasharp.config.rollout import SyncConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.hf_folder import HFReader, read_config
from megasharp.convert.model_folder import CONFIG_FILE, model_folder
from megasharp.evals.probe import FOLDER, Scorer, probe, read_responses, sample_responses, step_file, write_responses
from megasharp.evals.suites import Suite, load_suite
from megasharp.reporting.history import find_run
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.sglang.client.fleet import Fleet
from megasharp.rollout.sglang.client.health import check_engines
from megasharp.rollout.sglang.client.launch import FleetSettings, launch
from megasharp.rollout.step_request import Engine
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer
from megasharp.trainer.factories import make_engine
from megasharp.trainer.resolve.derived import derived
from megasharp.trainer.resolve.devices import check_names, gpus_here, limit_threads, sampling_device
from megasharp.trainer.resolve.engine_settings import check_context, check_window, engines_on_a_node, fleet_settings
from megasharp.trainer.resolve.models import MODEL_KEY
from megasharp.trainer.resolve.prompt_format import asking_of, prompts_meant
from megasharp.trainer.resume import commits_of
from megasharp.trainer.stored_config import as_judged
from megasharp.weight_sync.push import FleetSync, make_transport

# Stands for the name of the weights in the name of the folder that gets results.
CHECKPOINT = "{checkpoint}"
_CHECKPOINTS = "checkpoints"


def check_measurable(source: Path) -> None:
    """Raise UserError for a folder that is no run with a checkpoint and no weights. No weights are read."""
    if not _holds_weights(source) and not complete_steps(source / _CHECKPOINTS):
        raise UserError(f"{source}: neither a run with a checkpoint, nor a checkpoint, nor a Hugging Face folder")


@dataclass(frozen=True, slots=True)
class Measured:
    """A folder of weights that is measured, with its names.

    `label` names the model in a result, `place` is the folder of its results below evals/. For a run's checkpoint both
    have the run's name and the step.

    Example: `Measured(Path("runs/mine/checkpoints/step_000300"), "mine step 300", 300, Path("mine/step_000300"))`.
    """

    weights: Path
    label: str
    step: int | None
    place: Path

    @property
    def positions(self) -> int:
        """Tokens that a prompt and its response may have. Raises UserError for a model that is not supported."""
        return read_config(model_folder(self.weights).description)[2].max_positions


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that an evaluation measures, whether its weights are here or not.

    `label` and `step` name it in results, `place` is their folder below evals/, and `name` stands for `CHECKPOINT`.
    `identity` is what samples depend on. `engine` opens an engine with it, whose logs go to a folder. Without a
    `tokenizer` the engine reads messages. `check` refuses suites whose prompts it cannot be asked. `positions` is how
    many tokens a prompt and its response may have, where that is known.
    """

    label: str
    step: int | None
    place: Path
    name: str
    identity: Mapping[str, str]
    engine: Callable[[Path], AbstractContextManager[Engine]]
    tokenizer: TextTokenizer | None
    check: Callable[[Sequence[Suite]], None]
    positions: int | None = None

    def check_length(self, max_tokens: int) -> None:
        """Raise UserError for responses that leave no room for a prompt."""
        if self.positions is not None and max_tokens >= self.positions:
            raise UserError(
                f"eval: responses of {max_tokens} tokens leave no room for a prompt in the {self.positions} positions "
                f"of {self.label}; lower --max-tokens"
            )


class Sampler:
    """A subject's engine, made at its first use; its logs go to the folder `out`."""

    def __init__(self, subject: Subject, out: Path) -> None:
        self._subject = subject
        self._logs = (out / "logs").absolute()
        self._stack = signals.ClosingStack()
        self._made: Engine | None = None

    def get(self) -> Engine:
        """Return it. Raises UserError where it cannot be made."""
        if self._made is None:
            self._made = self._stack.enter_context(self._subject.engine(self._logs))
        return self._made

    def close(self) -> None:
        """End the engine."""
        self._stack.close()


def measured(source: Path) -> Measured:
    """Return the weights to measure: of a run, its newest checkpoint whose files are unchanged.

    Raises UserError as `check_measurable`, and where no checkpoint can be trusted.
    """
    check_measurable(source)
    if _holds_weights(source):
        return _named(source)
    found = CheckpointStore(source / _CHECKPOINTS, keep_last=1, keep_every=None).newest()
    assert found is not None
    return _named(found[0])


def config_of(source: Path) -> RunConfig | None:
    """Return the configuration of a run, or of the run that a checkpoint belongs to; None where there is none to read.

    Of a run that an older release began it has the prompts that this one meant, and the reading of responses.
    """
    folder = run_of_source(source)
    with suppress(UserError):
        return validate(RunConfig, as_judged(prompts_meant(stored_config(folder))), f"{folder}/config.yaml")
    return None


def run_of_source(source: Path) -> Path:
    """Return the folder of a run, or of the run that a checkpoint belongs to."""
    return source if _step_of(source.resolve()) is None else source.resolve().parent.parent


def _step_of(whole: Path) -> int | None:
    """Return the step of a run's checkpoint; None for another folder."""
    step = re.fullmatch(r"step_(\d+)", whole.name)
    return None if step is None or whole.parent.name != _CHECKPOINTS else int(step[1])


def _named(weights: Path) -> Measured:
    """Name weights by the run that a checkpoint belongs to, or else by their folder."""
    whole = weights.resolve()
    step = _step_of(whole)
    if (hub := hub_model(whole)) is not None:
        return Measured(weights, hub[0], None, Path(hub[0].replace("/", "--")))
    if step is None:
        return Measured(weights, whole.name, None, Path(whole.name))
    folder = whole.parent.parent
    # Its configuration has the run's name; of a checkpoint that was copied without one, the folder's must do.
    name: object = None
    try:
        name = stored_config(folder).get("name")
    except NewerFormat:
        raise
    except UserError:
        pass
    run = name if isinstance(name, str) else folder.name
    return Measured(weights, f"{run} step {step}", step, Path(run) / whole.name)


def _holds_weights(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / "policy").is_dir()


@contextmanager
def hf_folder(weights: Path) -> Iterator[Path]:
    """A Hugging Face folder as it is; a checkpoint or a Megatron folder converted, for as long as the block runs.

    Raises UserError where the folder is none of these.
    """
    if (weights / CONFIG_FILE).is_file():
        yield weights
        return
    # Imported here: Megatron takes seconds to import.
    from megasharp.learner.conversion import megatron_to_hf

    # The next of these removes what a killed one left: weights are large.
    with Scratch("megasharp-weights-") as folder:
        megatron_to_hf(weights, folder / "hf")
        yield folder / "hf"


@contextmanager
def engine_of(folder: Path) -> Iterator[InProcessEngine]:
    """The engine of this process with the weights of a Hugging Face folder; closed at the block's end."""
    with closing(make_engine(folder, torch.float32, sampling_device())) as engine:
        with HFReader(folder) as reader:
            limit_threads(reader.architecture)
            engine.load_weights(0, ((name, reader.tensor(name)) for name in reader.names()))
        yield engine


class _Folder:
    """A Hugging Face folder as the source of a weight sync."""

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
    with HFReader(folder) as reader:
        config, _ = derived(config, reader.architecture, ())
        settings = evaluation_settings(config, where, folder, logs)
        check_context(config, reader.architecture.max_positions, where)
        check_window(config, reader.architecture.smallest_window, where)
        check_engines(settings, where)
        fleet = Fleet(launch(settings), settings)
        try:
            sync = SyncConfig(bucket_mb=config.sync.bucket_mb, verify=True)
            FleetSync(fleet, make_transport(fleet, "shared_memory", sync)).push(_Folder(reader))
            yield fleet
        finally:
            fleet.close()


def evaluation_settings(config: RunConfig, where: str, folder: Path, logs: Path) -> FleetSettings:
    """Return the settings of engines on this machine alone, on all GPUs that this process may use."""
    settings, tp = fleet_settings(config, model_folder(folder), None, logs), config.rollout.tp
    gpus = gpus_here(config) if settings.device == "cuda" else []
    check_names(config, gpus)
    count = engines_on_a_node(config, where, len(gpus))
    each = [gpus[engine * tp : (engine + 1) * tp] for engine in range(count)] if gpus else ()
    rollout = settings.rollout.model_copy(update={"engines": count})
    return dataclasses.replace(settings, rollout=rollout, sleep=False, returns_experts=False, gpus=each)


@dataclass(frozen=True, slots=True)
class Probes:
    """The probe of one run: `count` problems of `suite`, responses of at most `max_tokens` tokens."""

    root: Path
    suite: Suite
    tokenizer: TextTokenizer
    count: int
    max_tokens: int

    def missing(self, step: int) -> bool:
        """Return whether the weights after `step` were not probed yet."""
        return not step_file(self.root / FOLDER, step).exists()

    def take(self, engine: Engine, step: int) -> Path | None:
        """Probe the engine's weights, which are those after `step`; None where the engine cannot score a text.

        The first call of a run samples the responses. Raises UserError where a file cannot be read or written.
        """
        if not isinstance(engine, Scorer):
            return None
        folder = self.root / FOLDER
        responses = read_responses(folder)
        if not responses:
            responses = sample_responses(
                engine, self.suite, self.tokenizer, count=self.count, max_tokens=self.max_tokens
            )
            write_responses(folder, responses)
        return probe(engine, self.tokenizer, responses, step_file(folder, step))


def probe_run(name: str, runs: Path, suite: str | None, count: int, say: Callable[[str], None]) -> None:
    """Probe a run's base model and those of its checkpoints that were not probed yet; say a line for each.

    Raises UserError where there is no such run, suite or model, or a file cannot be read or written.
    """
    root = find_run(name, runs)
    config = validate(RunConfig, prompts_meant(stored_config(root)), f"{root}/config.yaml")
    write_like(root)
    chosen = suite or next(iter(config.eval.suites), None)
    if chosen is None:
        raise UserError(f"{root}: the run evaluates on no suite; name one with --suite, whose problems are read")
    base = model_place(config.model.path, config.model.revision, commit=commits_of(root, config).get(MODEL_KEY))
    steps = complete_steps(root / "checkpoints")
    sources = {0: base} | {step: root / "checkpoints" / f"step_{step:06d}" for step in steps}
    longest = config.eval.max_response_tokens or config.data.largest_response
    for step, weights in sorted(sources.items()):
        path = step_file(root / FOLDER, step)
        if path.exists():
            say(f"{path}: there already")
            continue
        with hf_folder(weights) as folder, engine_of(folder) as engine:
            tokenizer = load_tokenizer(folder).with_bos(config.data.bos)
            probes = Probes(root, load_suite(chosen, asking=asking_of(config)), tokenizer, count, longest)
            say(f"wrote {probes.take(engine, step)}")


def probe_runs(names: Sequence[str], runs: Path, suite: str | None, count: int, say: Callable[[str], None]) -> None:
    """Probe each of these runs by `probe_run`."""
    for name in names:
        probe_run(name, runs, suite, count, say)
