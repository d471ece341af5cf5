"""`megasharp eval`: measures suites on a run's newest checkpoint, on a checkpoint, or on a Hugging Face folder.

Samples are stored as they are judged, so that after a kill or SIGUSR1 the same command continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from megasharp.checkpoint.recorded import CONFIG_FILE
from megasharp.checkpoint.run_folder import write_like_run
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.common.files import held
from megasharp.common.formats import Keep
from megasharp.common.signals import SaveAsked, Stopped, TimeIsUp, interruptible, save_heard
from megasharp.config.core import validate
from megasharp.config.data import RewardConfig
from megasharp.config.hub import given_model
from megasharp.config.rollout import EpisodesConfig
from megasharp.config.run_config import EvalConfig, RunConfig, load_run
from megasharp.convert.model_folder import model_folder
from megasharp.convert.record import weights_fingerprint
from megasharp.evals.evaluate import evaluate
from megasharp.evals.groups import Planned, PlannedGroup, Settings, known_names, plan_suites
from megasharp.evals.keeping import Keeping
from megasharp.evals.result import EvalResult, EvalSetting, averaged, save_group, summarize
from megasharp.evals.result_files import group_lines, load_figures, load_result, result_lines, save
from megasharp.evals.sample_store import SampleStore, check_identity
from megasharp.evals.stored_samples import journals
from megasharp.evals.suites import Asking, Suite
from megasharp.rollout.episodes.episode_engine import with_episodes
from megasharp.rollout.episodes.trial import try_turn
from megasharp.rollout.step_request import Engine
from megasharp.tasks.environment import plays
from megasharp.tasks.final_answer import WHOLE, AnswerRule, rule_of
from megasharp.tasks.judge import Judge, digest_of
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.tokenizer import load_tokenizer
from megasharp.tasks.user_import import look_beside
from megasharp.trainer.eval_endpoint import Endpoint, EndpointOptions
from megasharp.trainer.eval_source import (
    CHECKPOINT,
    Sampler,
    Subject,
    config_of,
    engine_of,
    engines_of,
    hf_folder,
    measured,
    run_of_source,
)
from megasharp.trainer.resolve.prompt_format import asking_of, check_mark, check_markers, checked_name
from megasharp.trainer.reward_judge import RewardJudge, check_judging, own_rewards, training_items

# Characters of a digest that tell two evaluations apart.
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command line. `suites` are suites and groups by name, none for those of the source's run;
    settings that are None are theirs.

    `engines` is a run file whose SGLang engines sample, with `overrides`; without it the engine of this process does.
    `out` None is a folder under evals/ named after the weights. `reward` decides where responses are judged, and its
    functions judge all of them; without one, the run's judge own rows without a task. The part of a response that is
    judged is the run's too, where `reward` does not say it. `prompt` is a template's name, or `suite`; without it a
    run's weights are asked as its training was. `keep` is what stays of samples, with texts up to `keep_mb` MiB in
    `out`; None is the default of `eval.keep_mb`. `turns` are keys of `rollout.episodes` that are given; `episodes` has
    all of them, the others from the run, or from the run file of `engines`.
    """

    source: Path | None
    suites: Sequence[str]
    settings: Settings
    temperatures: Sequence[float | None] = ()
    seed: int = 1
    out: Path | None = None
    engines: Path | None = None
    overrides: Sequence[str] = ()
    reward: RewardConfig = field(default_factory=RewardConfig)
    prompt: str | None = None
    keep: Keep = "texts"
    keep_mb: int | None = None
    endpoint: EndpointOptions | None = None
    turns: Mapping[str, int] = field(default_factory=dict)
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)


def settings(**given: object) -> Settings:
    """Validate the settings given on the command line. Raises UserError in one line."""
    return validate(Settings, given, "eval")


def numbers(temperatures: str | None) -> list[float | None]:
    """Read temperatures separated by commas, each once. Raises UserError for what is none."""
    if temperatures is None:
        return []
    try:
        found = [float(part) for part in temperatures.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.0 <= value < float("inf") for value in found):
        raise UserError(f"--temperature {temperatures}: expected numbers from 0 on, such as 0.6 or 0.6,1.0")
    return [*dict.fromkeys(found)]


def evaluate_source(asked: Asked, say: Say, note: Say) -> None:
    """Evaluate, write the files, and print the metrics. Raises UserError in one line.

    SIGUSR1 ("time is nearly up") ends it with exit code 75; the samples stay for the next start.
    """
    source = _checked_source(asked)
    run = None if source is None else config_of(source)
    if run is not None:
        asked = replace(asked, reward=read_as(rule_of(run.reward), asked.reward))
    if asked.prompt is not None:
        asking = Asking(checked_name(asked.prompt), first=True)
    else:
        asking = Asking() if run is None else asking_of(run)
    longest = None if run is None else run.eval.max_response_tokens or run.data.largest_response
    suites = asked.suites or _suites_of(run, source)
    # Functions are found beside suites of own rows, and beside the folder of runs, which has a sweep's folder in it.
    above = run_of_source(source).resolve().parents if run and source else []
    folders = [*above[:1], *(place for place in above[1:3] if place.name == "runs")]
    for near in (*filter(Path.is_file, map(Path, suites)), *folders):
        look_beside(near)
    sweep = []
    for temperature in asked.temperatures or [None]:
        changed = {} if temperature is None else {"temperature": temperature}
        sweep.append(plan_suites(suites, asked.settings.model_copy(update=changed), asked.seed, asking, longest))
    asked = replace(asked, episodes=_episodes(asked, sweep, run))
    asked, sweep = judged_by_functions(asked, sweep, run)
    planned = [each.suite for groups in sweep for group in groups for each in group.evaluations]
    tasks = {suite.task for suite in planned}
    check_judging(asked.reward, tasks, "eval")
    for line in _ours(sweep[0]):
        note(line)
    evaluation: _Evaluation | None = None
    try:
        with save_heard(), interruptible():
            subject = _subject(asked, source, run.data.bos if run else None, note)
            if subject.tokenizer is not None:
                items = chain.from_iterable(suite.items for suite in planned)
                try_turn(items, subject.tokenizer, asked.episodes, "eval")
            evaluation = _Evaluation(asked, subject, say, note)
            if source is not None:
                write_like_run(source, evaluation.root)
            with held(evaluation.root, "another megasharp eval writes there; give another --out"):
                evaluation.open_all(sweep)
                with closing(RewardJudge(asked.reward, tasks, None, note)) as judging, evaluation.engine():
                    evaluation.run_all(sweep, judging.judge)
    except SaveAsked:
        raise TimeIsUp(f"SIGUSR1 (time is nearly up): {_kept(evaluation)}") from None
    except Stopped as stopped:
        raise Stopped(stopped.number, _kept(evaluation)) from None


def _checked_source(asked: Asked) -> Path | None:
    """Return the folder to read; None for an endpoint without one. Raises UserError for what does not go together."""
    if asked.endpoint is None:
        if asked.source is None:
            raise UserError(
                "say what to evaluate: a run, a checkpoint or a Hugging Face folder; --endpoint URL; or --compare "
                "A.json B.json"
            )
        # Beside runs it is meant as one, and else it may be an id of the hub.
        if not asked.source.exists() and any(asked.source.parent.glob(f"*/{CONFIG_FILE}")):
            raise UserError(f"{asked.source}: no run of this name in {asked.source.parent}; see megasharp runs list")
        return given_model(str(asked.source))
    if asked.engines is not None:
        raise UserError("eval: --endpoint samples by itself; leave out --engines")
    if (asked.source is None) == (asked.endpoint.style == "tokens"):
        raise UserError(
            "eval: with --endpoint, a folder's tokenizer writes the prompts of --endpoint-api tokens; "
            + ("give the folder" if asked.source is None else "leave the folder out, or say that")
        )
    return None if asked.source is None else given_model(str(asked.source))


def _episodes(asked: Asked, sweep: Sequence[Sequence[PlannedGroup]], run: RunConfig | None) -> EpisodesConfig:
    """Return how suites with an environment are played. Raises UserError where nothing can play them, or none does."""
    playing = [
        each.suite.name for groups in sweep for group in groups for each in group.evaluations if plays(each.suite.items)
    ]
    if asked.turns and not playing:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in asked.turns)
        raise UserError(f"eval: {given}: no suite here has an environment, so that every response has one turn")
    if playing and asked.endpoint is not None:
        raise UserError(
            f"eval: {playing[0]} has an environment, whose answers are put behind the tokens that the model has said; "
            "a server of OpenAI's API gives no such tokens. Evaluate the folder of the weights, with --engines for "
            "SGLang's engines"
        )
    if run is None and asked.engines is not None:
        run = load_run(asked.engines, asked.overrides)
    own = EpisodesConfig() if run is None else run.rollout.episodes
    return validate(EpisodesConfig, {**own.model_dump(), **asked.turns}, "eval")


def _subject(asked: Asked, source: Path | None, bos: bool | None, note: Say) -> Subject:
    tokenizer = model = None
    if source is not None:
        model = measured(source)
        tokenizer = load_tokenizer(model_folder(model.weights).description).with_bos(bos)
    if asked.endpoint is not None:
        served = Endpoint(asked.endpoint, note)
        name = served.place.name
        return Subject(served.model, None, served.place, name, served.identity, served.engine, tokenizer, served.check)
    assert model is not None and tokenizer is not None
    weights = model.weights
    identity = {
        "weights": weights_fingerprint(model_folder(weights))[:_DIGEST],
        "engine": "inprocess" if asked.engines is None else "sglang",
    }

    def check(suites: Sequence[Suite]) -> None:
        check_markers("", suites, tokenizer, "eval", "--prompt")
        check_mark(asked.reward.answer_after, tokenizer, "eval: --answer-after")

    @contextmanager
    def engine(logs: Path) -> Iterator[Engine]:
        opened: AbstractContextManager[Engine]
        with hf_folder(weights) as folder:
            if asked.engines is None:
                opened = engine_of(folder)
            else:
                opened = engines_of(load_run(asked.engines, asked.overrides), str(asked.engines), folder, logs)
            with opened as made:
                yield made

    room = model.positions
    return Subject(model.label, model.step, model.place, weights.name, identity, engine, tokenizer, check, room)


def read_as(rule: AnswerRule, own: RewardConfig) -> RewardConfig:
    """Return the options of the command line with a rule of reading responses, where they do not say one."""
    its = {"answer_after": rule.after, "truncated": rule.truncated}
    return own.model_copy(update={key: value for key, value in its.items() if key not in own.model_fields_set})


def _suites_of(run: RunConfig | None, source: Path | None) -> Sequence[str]:
    """Return the suites of a run. Raises UserError, with all names, where there are none."""
    if run is not None and run.eval.suites:
        return run.eval.suites
    none = "is no run, whose eval.suites would be taken" if run is None else "is a run without eval.suites"
    raise UserError(
        f"{source or 'an endpoint'} {none}: say --suite NAME, or the path of a YAML file with set: NAME, or with path: "
        f"and the other keys of data for rows of your own; {known_names()}"
    )


def judged_by_functions(
    asked: Asked, sweep: list[list[PlannedGroup]], run: RunConfig | None
) -> tuple[Asked, list[list[PlannedGroup]]]:
    """Give all suites to the functions that are asked for; without such, those of own rows to the run's functions.

    Raises UserError where one cannot judge a suite's rows.
    """
    every = bool(own_rewards(asked.reward))
    if not every and run is not None:
        its = {key: getattr(run.reward, key) for key in ("function", "functions", "concurrency")}
        asked = replace(asked, reward=asked.reward.model_copy(update=its))

    def judged(planned: Planned) -> Planned:
        if not (every or planned.suite.task == OWN_TASK) or not own_rewards(asked.reward):
            return planned
        items = training_items(planned.suite.items, asked.reward, "eval")
        return replace(planned, suite=replace(planned.suite, task=OWN_TASK, items=tuple(items)))

    found = [
        [replace(group, evaluations=tuple(map(judged, group.evaluations))) for group in groups] for groups in sweep
    ]
    if not any(each.suite.task == OWN_TASK for groups in found for group in groups for each in group.evaluations):
        # An unused function would start workers.
        asked = replace(asked, reward=asked.reward.model_copy(update={"function": None, "functions": []}))
    return asked, found


def judging_identity(reward: RewardConfig, suite: Suite) -> dict[str, str]:
    """Return the part of an evaluation's identity that says by which answers and by whom it is judged."""
    own, rule = own_rewards(reward).get(suite.task), rule_of(reward)
    return {
        "problems": digest_of(suite.items)[:_DIGEST],
        "timeout_s": f"{reward.timeout_s:g}",
        **({"reward": ", ".join(f"{each.path} x {each.weight:g}" for each in own.functions)} if own else {}),
        # Results of older releases, which read whole responses, are those of this rule.
        **({} if own or rule == WHOLE else {"answers": rule.in_words}),
    }


def _ours(groups: Sequence[PlannedGroup]) -> Iterator[str]:
    for group in groups:
        if group.ours:
            yield f"{group.name}: the paper does not say {', '.join(group.ours)}; the values are ours"


def _kept(evaluation: _Evaluation | None) -> str:
    samples = sum(1 for _ in evaluation.store.stored()) if evaluation and evaluation.store else 0
    if not samples:
        return "nothing of the present suite is sampled yet; the same command goes on"
    return f"{samples} samples of the present suite are kept; the same command goes on"


class _Evaluation:
    """One command's evaluations, in order; the engine starts when the first of them needs it."""

    def __init__(self, asked: Asked, subject: Subject, say: Say, note: Say) -> None:
        self._asked = asked
        self._subject = subject
        self._say, self._note = say, note
        self.root = Path(str(asked.out or Path("evals") / subject.place).replace(CHECKPOINT, subject.name))
        bound = EvalConfig().keep_mb if asked.keep_mb is None else asked.keep_mb
        self._keeping = Keeping(self.root, asked.keep, bound)
        self._sampler: Sampler | None = None
        self.store: SampleStore | None = None

    def open_all(self, sweep: Sequence[Sequence[PlannedGroup]]) -> None:
        """Raise UserError before anything starts: for prompts of other models, or another evaluation's files."""
        for groups in sweep:
            for group in groups:
                self._subject.check([each.suite for each in group.evaluations])
                for each in group.evaluations:
                    self._subject.check_length(each.sampling.max_tokens)
                    if self._done(each) is None:
                        self._keeping.open(self._folder(each), self._setting(each))

    @contextmanager
    def engine(self) -> Iterator[None]:
        """Make an engine available inside the block, and close it at its end."""
        self._sampler = Sampler(self._subject, self.root)
        try:
            yield
        finally:
            self._sampler.close()

    def run_all(self, sweep: Sequence[Sequence[PlannedGroup]], judge: Judge) -> None:
        """Evaluate everything, and print each result, and the average of each group of suites."""
        for groups in sweep:
            for group in groups:
                results = [self._result(each, judge) for each in group.evaluations]
                if group.group is None:
                    continue
                members: dict[str, list[EvalResult]] = {}
                for each, result in zip(group.evaluations, results, strict=True):
                    members.setdefault(each.member, []).append(result)
                table = averaged(group.name, group.group.source, group.ours, members, self._asked.seed)
                path = save_group(table, self._folder(group.evaluations[0]))
                for line in group_lines(table):
                    self._say(line)
                self._say(f"wrote {path}")

    def _folder(self, planned: Planned) -> Path:
        """Return the folder of an evaluation's files: in a sweep, each temperature has its own."""
        if len(self._asked.temperatures) < 2:
            return self.root
        temperature = planned.sampling.temperature
        short = f"{temperature:g}"
        # Two temperatures that differ only after the sixth digit still get a folder each.
        return self.root / f"temperature_{short if float(short) == temperature else temperature}"

    def _identity(self, planned: Planned) -> dict[str, str]:
        return {
            **self._subject.identity,
            **planned.sampling.identity(),
            "seed": str(planned.seed),
            **judging_identity(self._asked.reward, planned.suite),
            **(self._asked.episodes.identity if plays(planned.suite.items) else {}),
        }

    def _setting(self, planned: Planned) -> EvalSetting:
        sampling = planned.sampling
        episodes = self._asked.episodes if plays(planned.suite.items) else None
        return EvalSetting(
            planned.suite.name,
            self._subject.label,
            self._subject.step,
            sampling.n,
            sampling.ks,
            sampling.temperature,
            planned.seed,
            sampling.top_p,
            sampling.max_tokens,
            self._identity(planned),
            sampling.top_k,
            sampling.min_p,
            sampling.stop,
            None if episodes is None else episodes.max_turns,
            None if episodes is None else episodes.turn_tokens,
        )

    def _done(self, planned: Planned) -> Path | None:
        """Return the file of this evaluation where it is done. Raises UserError where it is another's."""
        path = self._folder(planned) / f"{planned.suite.name}.json"
        if not path.exists():
            return None
        check_identity(load_figures(path).identity, self._identity(planned), f"{path} is the result")
        return path

    def _result(self, planned: Planned, judge: Judge) -> EvalResult:
        done = self._done(planned)
        if done is None:
            result = self._evaluated(planned, judge)
        else:
            # From the counts of its samples, for every k that it or `planned` has.
            before, setting = load_result(done), self._setting(planned)
            setting = replace(setting, ks=tuple(sorted({*planned.sampling.ks, *before.ks})))
            result = summarize(before.rows, setting, before.seconds)
            if journals(self._folder(planned), planned.suite.name):
                # A kill came between the result and the end of its samples.
                self.store = self._keeping.open(self._folder(planned), self._setting(planned))
        path = save(result, self._folder(planned))
        if self.store:
            self.store.finish()
            self.store = None
        for line in result_lines(result):
            self._say(line)
        self._say(f"wrote {path}" if done is None else f"{path} was measured before; figures are from its samples")
        return result

    def _evaluated(self, planned: Planned, judge: Judge) -> EvalResult:
        assert self._sampler is not None
        engine = self._sampler.get()
        setting = self._setting(planned)
        samples = len(planned.suite.items) * (setting.n + 1)
        self._note(self._keeping.line(setting.suite, samples, planned.sampling.max_tokens))
        self.store = self._keeping.open(self._folder(planned), setting, self._note)
        own = own_rewards(self._asked.reward).get(planned.suite.task)
        with ExitStack() as stack:
            if plays(planned.suite.items):
                assert self._subject.tokenizer is not None, "endpoints are refused"
                engine = with_episodes(engine, self._subject.tokenizer, self._asked.episodes)
                stack.callback(engine.end)
            return evaluate(
                engine,
                planned.suite,
                self._subject.tokenizer,
                setting,
                judge=judge,
                store=self.store,
                together=own is not None and own.compares,
                say=self._note,
            )
