"""`megasharp eval`: one suite on a run's newest checkpoint, on a checkpoint, or on a Hugging Face folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from megasharp.build.eval_engines import engines_of
from megasharp.build.judging import Judging, check_judging
from megasharp.build.measured import CHECKPOINT, measured
from megasharp.build.parts import make_engine
from megasharp.build.threads import limit_threads
from megasharp.command import note
from megasharp.config.run import RewardConfig, load_run
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.data.tokenizer import load_tokenizer
from megasharp.errors import RunFailed, UserError
from megasharp.evals.evaluate import evaluate
from megasharp.evals.files import save
from megasharp.evals.suites import load_suite
from megasharp.protocols import Engine
from megasharp.signals import SaveAsked, interruptible, save_heard


def evaluate_source(
    source: Path,
    suite: str,
    *,
    n: int,
    k: str,
    temperature: float,
    max_tokens: int,
    seed: int,
    out: Path | None,
    engines: Path | None = None,
    overrides: Sequence[str] = (),
    reward: RewardConfig | None = None,
) -> str:
    """Evaluate and write `<suite>.json`; returns lines to print. `reward` says where responses are judged.

    Raises UserError in one line.

    `engines` is a run file whose SGLang engines sample, with `overrides`; without it the engine of this process does.
    SIGUSR1 ("time is nearly up") ends it: there is nothing that a later one could go on with.
    """
    ks = _values_of_k(k)
    loaded = load_suite(suite)
    reward = reward or RewardConfig()
    check_judging(reward, {loaded.task}, "megasharp eval")
    with save_heard():
        try:
            with interruptible():
                weights = measured(source)
                target = Path(str(out or Path("evals") / source.name).replace(CHECKPOINT, weights.name))
                with (
                    closing(Judging(reward, {loaded.task}, None, note)) as judging,
                    _hf_folder(weights) as folder,
                    _engine(folder, engines, overrides, target) as engine,
                ):
                    result = evaluate(
                        engine,
                        loaded,
                        load_tokenizer(folder),
                        n=n,
                        ks=ks,
                        temperature=temperature,
                        max_tokens=max_tokens,
                        seed=seed,
                        label=weights.name,
                        judge=judging.judge,
                    )
        except SaveAsked:
            raise RunFailed(
                f"SIGUSR1 (time is nearly up) ended the evaluation on {loaded.name}, of which nothing can be kept; "
                "start it again with more time or a smaller n"
            ) from None
        path = save(result, target)
    figures = [f"{name.removeprefix('eval/')}: {value:.4f}" for name, value in result.figures().items()]
    return "\n".join([*figures, f"wrote {path}"])


@contextmanager
def _engine(folder: Path, engines: Path | None, overrides: Sequence[str], out: Path) -> Iterator[Engine]:
    if engines is not None:
        config = load_run(engines, overrides)
        with engines_of(config, str(engines), folder, (out / "logs").absolute()) as fleet:
            yield fleet
        return
    engine = make_engine(folder)
    try:
        with HFReader(folder) as reader:
            limit_threads(reader.architecture)
            engine.load_weights(0, ((name, reader.tensor(name)) for name in reader.names()))
        yield engine
    finally:
        engine.close()


def _values_of_k(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--k {text}: expected comma-separated whole numbers, such as 1,4,16") from None


@contextmanager
def _hf_folder(weights: Path) -> Iterator[Path]:
    """A Hugging Face folder of a checkpoint's weights, converted into a temporary folder where needed."""
    if (weights / CONFIG_FILE).is_file():
        yield weights
        return
    from megasharp.mcore.conversion import megatron_to_hf

    with tempfile.TemporaryDirectory(prefix="megasharp-eval-") as folder:
        megatron_to_hf(weights, Path(folder) / "hf")
        yield Path(folder) / "hf"
