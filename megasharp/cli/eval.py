"""`megasharp eval`: evaluate a model on suites, or compare results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common import output
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import collect_as_usual, note, status
from megasharp.common.formats import Keep
from megasharp.common.signals import save_heard
from megasharp.rollout.endpoint import Style

SAMPLING = "Sampling"
JUDGING = "Judging responses"
ENDPOINT = "A server of OpenAI's API"
COMPARE = "Compare results"
KEEPING = "Keeping samples"


# The options that a command has which evaluates nothing, by the one that asks for it.
_TAKEN = {
    "compare": {"compare", "beside", "k", "problems", "source"},
    "rejudge": {
        *("rejudge", "suite", "out", "k", "reward", "prompt", "answer_after", "truncated", "workers", "timeout_s"),
        *("sandbox", "problems", "source"),
    },
    "export": {"export", "suite", "out", "source"},
}


def _check_options(ctx: typer.Context) -> None:
    """Raise UserError for options that would have no effect on this command."""
    given = {
        each.name: each.opts[0]
        for each in ctx.command.params
        if each.name and (source := ctx.get_parameter_source(each.name)) is not None and source.name == "COMMANDLINE"
    }
    asked = next((name for name in _TAKEN if name in given), "compare" if "beside" in given else None)
    others = [] if asked is None else [option for name, option in given.items() if name not in _TAKEN[asked]]
    if asked and others:
        raise UserError(f"eval: {given.get(asked, '--with')} samples nothing; leave out {', '.join(others)}")


# From here on: it may come while PyTorch is loading.
@save_heard()
def evaluate(
    ctx: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(help="Model to evaluate: a run, one of its checkpoints, or a Hugging Face folder.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Suites or groups, by name or file, comma-separated. Without it: the run's eval.suites."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; {checkpoint} in it stands for the checkpoint's name."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per problem. Without it: the group's, or 64.", rich_help_panel=SAMPLING),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="Values of k for pass@k, as 1,4,16 or 1,2,4,...,1024.", rich_help_panel=SAMPLING),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            help="Temperature, or several, as 0.6,1.0. Without it: the group's, or 1.0.", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Nucleus sampling. Without it: the group's, or 1.0.", rich_help_panel=SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most likely tokens that may be sampled; 0 is all. Without it: the group's, or 0.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Share of the most likely token's probability that a token needs. Without it: the group's, or 0.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="String that ends a response and is no part of its text; repeatable. \\n is a line break.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest response in tokens. Without it: the group's, or the run's.", rich_help_panel=SAMPLING
        ),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a suite with an environment: most turns of a response. Without it: the run's, or 8.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    turn_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a suite with an environment: longest turn in tokens. Without it: the run's, or --max-tokens.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Name of a prompt template, or suite for each suite's own as published.", rich_help_panel=SAMPLING
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.", rich_help_panel=SAMPLING)] = 1,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server of OpenAI's API that samples, as http://localhost:30000/v1. Its key is read from the variable "
            "MEGASHARP_ENDPOINT_KEY.",
            rich_help_panel=ENDPOINT,
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(help="Model to ask it for. Without it: the only one that it has.", rich_help_panel=ENDPOINT),
    ] = None,
    endpoint_api: Annotated[
        Style,
        typer.Option(
            help="chat sends messages, text a text to be continued, tokens what the tokenizer of SOURCE makes of it.",
            rich_help_panel=ENDPOINT,
        ),
    ] = "chat",
    concurrency: Annotated[
        int, typer.Option(min=1, help="Number of calls under way at once.", rich_help_panel=ENDPOINT)
    ] = 32,
    samples_per_call: Annotated[
        int,
        typer.Option(
            min=1,
            help="Samples of a problem in one call, at most 8; all but the first then have no seed.",
            rich_help_panel=ENDPOINT,
        ),
    ] = 1,
    call_limit_s: Annotated[
        float, typer.Option(min=0.01, help="Seconds that one call may take.", rich_help_panel=ENDPOINT)
    ] = 1800.0,
    engines: Annotated[
        Path | None,
        typer.Option(help="Run file whose SGLang engines sample.", rich_help_panel=SAMPLING),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With --engines: a key of that file to override; repeatable.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that judges, as reward.function; the values of several are added up.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    answer_after: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Mark behind which answers stand, as reward.answer_after. Without it: the run's, or auto.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    truncated: Annotated[
        str | None,
        typer.Option(
            help="Verdict on responses at the limit of tokens, as reward.truncated: by_answer, wrong or as_whole.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of processes that judge responses. 0: judge in this process, if the task allows it.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(min=0.01, help="With --workers: seconds for one response.", rich_help_panel=JUDGING),
    ] = 10.0,
    sandbox: Annotated[
        bool,
        typer.Option(
            help="Run programs that the model writes in bubblewrap; else they have your rights.",
            rich_help_panel=JUDGING,
        ),
    ] = True,
    keep: Annotated[
        Keep,
        typer.Option(
            help="Part of each sample that stays in the folder's samples/: none, answers, texts, or tokens (texts and "
            "token ids).",
            rich_help_panel=KEEPING,
        ),
    ] = "texts",
    keep_mb: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Bound in MiB on what is kept in the folder; above it answers alone are. Without it: 2048.",
            rich_help_panel=KEEPING,
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="A.json B.json",
            help="Compare two results instead of evaluating; before --with, the results of one method's runs.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="B1.json B2.json",
            help="With --compare: results of the other method's runs. Two and more a side give intervals over runs.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    problems: Annotated[
        bool,
        typer.Option("--problems", help="With --compare or --rejudge: name the problems.", rich_help_panel=COMPARE),
    ] = False,
    rejudge: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Judge the stored samples of an evaluation again, without its model; FOLDER has its results.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write stored samples as lm-evaluation-harness logs them; FOLDER has an evaluation's results.",
            rich_help_panel=KEEPING,
        ),
    ] = None,
) -> None:
    """Evaluate a model on suites: pass@k, maj@k and entropies with intervals. Compare results, or judge again.

    An evaluation that was cut off goes on where it stopped. Exit code 75: SIGUSR1 came; what was sampled is kept.
    """
    _check_options(ctx)
    if stop and not all(stop):
        raise UserError("eval: --stop holds an empty text, which would end every response at once; leave it out")
    if compare or beside:
        files = [*(compare or []), *(beside or [])]
        status(f"loading PyTorch, then comparing {files[0]} with {files[-1]}")
        from megasharp.reporting.comparison import compare_results

        compare_results(source, compare or [], beside or [], k, problems, typer.echo)
        return
    output.outlive()
    status(f"loading PyTorch, then reading {source or rejudge or export or engines or endpoint or 'the options'}")
    from megasharp.config.core import validate
    from megasharp.config.data import RewardConfig
    from megasharp.trainer.eval_endpoint import EndpointOptions
    from megasharp.trainer.evaluation import Asked, evaluate_source, numbers, settings

    collect_as_usual()
    served = None
    if endpoint is not None:
        served = EndpointOptions(endpoint, endpoint_model, endpoint_api, concurrency, samples_per_call, call_limit_s)
    turns = {"max_turns": max_turns, "turn_tokens": turn_tokens}
    reading = {"answer_after": answer_after, "truncated": truncated}
    asked = Asked(
        source,
        [name.strip() for name in (suite or "").split(",") if name.strip()],
        settings(
            n=n,
            k=k,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=[text.replace("\\n", "\n") for text in stop] if stop else None,
            max_tokens=max_tokens,
        ),
        numbers(temperature),
        seed,
        out,
        engines,
        overrides or [],
        validate(
            RewardConfig,
            {
                "workers": workers,
                "timeout_s": timeout_s,
                "sandbox": "bubblewrap" if sandbox else "none",
                "functions": [{"function": path} for path in reward or ()],
                **{key: value for key, value in reading.items() if value is not None},
            },
            "eval",
        ),
        prompt,
        keep,
        keep_mb,
        served,
        {name: value for name, value in turns.items() if value is not None},
    )
    folder = rejudge or export
    if folder is None:
        evaluate_source(asked, typer.echo, note)
        return
    if source is not None or (rejudge and export):
        raise UserError(f"{source or export}: --rejudge or --export takes a folder of results; leave this out")
    from megasharp.trainer.rejudging import export_samples, rejudge_folder

    if rejudge is not None:
        rejudge_folder(folder, asked, problems, typer.echo, note)
    else:
        export_samples(folder, asked, typer.echo)
