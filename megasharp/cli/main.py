"""The command line: parse, call, print. A user's mistake is one line on standard error and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp import __version__
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import collect_as_usual, collect_seldom, run_command

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning with verifiable rewards that keeps a model's answers diverse.",
)
DTYPES = "float32, bfloat16 or float16"
convert = typer.Typer(no_args_is_help=True, help="Convert checkpoints between Hugging Face and Megatron.")
app.add_typer(convert, name="convert")
runs_app = typer.Typer(no_args_is_help=True, help="Look at runs: where one stands, several side by side, a list.")
app.add_typer(runs_app, name="runs")
data_app = typer.Typer(no_args_is_help=True, help="Look at data sets, and at what training shares with evaluation.")
app.add_typer(data_app, name="data")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"megasharp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="The folder that gets them; a new or an empty one.")] = Path("quickstart"),
) -> None:
    """Write a first run: a run file, a tiny model and its data, and say the command that trains it in minutes."""
    from megasharp.trainer.quickstart import write_quickstart

    write_quickstart(out, typer.echo)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides by dotted path.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run of this name, or start it.")] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="With --resume: a key of the run that may change; repeatable."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Start again so often after failures, with --resume.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved config and the layout; start nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """Train: RLVR from a model's folder, as the run's YAML file says."""
    if retries and not dry_run:
        from megasharp.trainer.retries import train_again

        raise typer.Exit(train_again(config, overrides or [], runs, resume, allow_change or [], retries))
    from megasharp.config.core import dump_yaml
    from megasharp.config.run_config import load_run
    from megasharp.trainer.resolve.devices import leave_gpus_alone
    from megasharp.trainer.resolve.resolved_run import check
    from megasharp.trainer.resolve.summary import describe

    run = load_run(config, overrides or [])
    leave_gpus_alone(run)
    checked = check(run, str(config))
    if dry_run:
        typer.echo(dump_yaml(checked.config) + "\n" + describe(checked))
        return
    from megasharp.metrics.clock import process_began
    from megasharp.trainer.run import train as run_training

    typer.echo(describe(checked))
    collect_as_usual()
    folder = run_training(
        checked,
        runs / checked.config.name,
        resume=resume,
        allowed=allow_change or [],
        say=typer.echo,
        began=process_began(),
    )
    typer.echo(f"run folder: {folder}")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="The run's YAML file; it need not be able to start here.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides by dotted path.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Fill so many nodes: sets dp and the engines.")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200 (default), h100, b200, or a GPU's memory in MiB.")] = None,
    mfu: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Model FLOPs utilisation; 0.40.")] = None,
    response: Annotated[int | None, typer.Option(min=1, help="Mean response in tokens; half of the limit.")] = None,
    disk: Annotated[float | None, typer.Option(min=0.001, help="GB/s of the shared disk, in all; 10.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON.")] = False,
    suggest: Annotated[bool, typer.Option(help="Search layouts; print the best three with reasons.")] = False,
) -> None:
    """Say what a run needs of each GPU and how long a step takes. Exit code 1: it would not work."""
    from megasharp.trainer.plan import ModelCheck

    with ModelCheck() as check:
        from megasharp.config.run_config import load_run
        from megasharp.trainer.plan import Options, plan_run

        run, options = load_run(config, overrides or []), Options(nodes, gpu, mfu, response, disk)
        answer = plan_run(run, str(config), options, check, as_json=as_json, suggestions=suggest)
    typer.echo(answer.text)
    if not answer.works:
        raise typer.Exit(1)


@app.command()
def submit(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides by dotted path.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of one attempt: HH:MM:SS, D-HH:MM:SS or minutes.")] = "24:00:00",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; cluster.nodes of the run file.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="CPUs of a node; without it, whole nodes.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further option of sbatch, as --qos=high.")] = None,
    lead: Annotated[
        int | None, typer.Option(min=1, help="Ask to save and end so many seconds early; 600, with --eval 60.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often the job may queue itself again.")] = 20,
    retries: Annotated[int, typer.Option(min=0, help="How often a job starts a run that failed again.")] = 3,
    python: Annotated[str | None, typer.Option(help="Python with megasharp on the nodes; this one.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis; the nodes as they are.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="/from:/to, seen in the container.")] = None,
    suite: Annotated[str | None, typer.Option("--eval", help="Evaluate on this suite instead of training.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="With --eval: what to evaluate; the run's newest.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
    doctor: Annotated[
        bool | None, typer.Option(help="Examine nodes before each attempt; where there are GPUs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the sbatch file; submit nothing.")] = False,
) -> None:
    """Submit a run to Slurm, which saves before its time limit and queues itself again, or an evaluation."""
    from megasharp.trainer.submit import Asked, submit_run

    asked = Asked(
        file=config,
        overrides=overrides or [],
        runs=runs,
        time=time,
        nodes=nodes,
        cpus_per_node=cpus_per_node,
        lead_s=lead,
        restarts=restarts,
        retries=retries,
        partition=partition,
        account=account,
        extra=sbatch or [],
        python=python,
        container=container,
        mounts=mount or [],
        suite=suite,
        checkpoint=checkpoint,
        doctor=doctor,
    )
    submit_run(asked, dry_run=dry_run, say=typer.echo)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="The run's YAML file: what it expects of a node.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides by dotted path.")] = None,
    nodes: Annotated[bool, typer.Option(help="Examine every node of this Slurm job, and the links between.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """Look at GPUs, versions, disk, ports and links before a run. Exit code 1: something must be mended first."""
    from megasharp.trainer.doctor import doctor as examine
    from megasharp.trainer.doctor import doctor_on_all_nodes

    if nodes:
        raise typer.Exit(doctor_on_all_nodes(config, overrides or [], runs))
    if not examine(config, overrides or [], runs, typer.echo):
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    source: Annotated[
        Path | None, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face folder.")
    ] = None,
    suite: Annotated[str, typer.Option(help="Suites or groups of them, by name or file.")] = "countdown_test",
    n: Annotated[int | None, typer.Option(min=1, help="Samples per problem; 64, or the group's.")] = None,
    k: Annotated[str | None, typer.Option(help="For pass@k: 1,4,16 or 1,2,4,...,1024.")] = None,
    temperature: Annotated[str | None, typer.Option(help="One or several, as 0.6,1.0; 1.0, or the group's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1.0, or the group's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest response; 32 tokens, or the group's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; {checkpoint} in it: its name.")] = None,
    engines: Annotated[Path | None, typer.Option(help="A run file: its SGLang engines sample.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="With --engines: key=value for it.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that judge responses; 0: this one, if the task may.", min=0)
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="With --workers: seconds for one response.", min=0.01)] = 10.0,
    sandbox: Annotated[bool, typer.Option(help="Programs run in bubblewrap; else with your rights.")] = True,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.json B.json", help="Compare two results instead.")
    ] = None,
    problems: Annotated[bool, typer.Option("--problems", help="With --compare: name the problems.")] = False,
) -> None:
    """Evaluate a model: pass@k, maj@k, entropies, with intervals; goes on where it was cut off. Or compare two results.

    Exit code 75: SIGUSR1 came, what was sampled is kept.
    """
    if compare is not None:
        from megasharp.trainer.evaluation import compare_results

        compare_results(source, *compare, k, problems, typer.echo)
        return
    from megasharp.common.exit_codes import note
    from megasharp.config.data import RewardConfig
    from megasharp.trainer.evaluation import Asked, evaluate_source, numbers, settings

    collect_as_usual()
    asked = Asked(
        source,
        [name.strip() for name in suite.split(",")],
        settings(n, k, top_p, max_tokens),
        numbers(temperature),
        seed,
        out,
        engines,
        overrides or [],
        RewardConfig(workers=workers, timeout_s=timeout_s, sandbox="bubblewrap" if sandbox else "none"),
    )
    evaluate_source(asked, typer.echo, note)


@app.command()
def sweep(
    grid: Annotated[Path, typer.Argument(help="The sweep's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides of the sweep's keys.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs on this machine at the same time.")] = 1,
    slurm: Annotated[bool, typer.Option(help="Submit the runs as one Slurm array instead.")] = False,
    results: Annotated[bool, typer.Option(help="Run nothing: table, CSV and picture of what is finished.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --results: their folder; the sweep's own.")] = None,
    dry_run: Annotated[bool, typer.Option(help="List the runs, or print the array's file; start nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder that holds the sweep's folder of runs.")] = Path("runs"),
) -> None:
    """Run a grid of runs, each seed of each case, or go on with it; the same command resumes what is not finished."""
    from megasharp.trainer.sweep import Sweep

    whole = Sweep(grid, overrides or [], runs, typer.echo)
    if results:
        whole.tell(out)
    elif slurm:
        whole.submit(dry_run=dry_run)
    else:
        whole.run(at_once, dry_run=dry_run)


@app.command()
def probe(
    names: Annotated[list[str], typer.Argument(help="Runs, by folder or name.")],
    suite: Annotated[str | None, typer.Option(help="Whose problems are read; the run's first suite.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Where the run has no responses yet: how many to sample.")] = 32,
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """Let a run's base model and checkpoints read the same responses, for `megasharp report`; what is there stays."""
    from megasharp.trainer.eval_source import probe_runs

    collect_as_usual()
    probe_runs(names, runs, suite, problems, typer.echo)


@app.command()
def report(
    names: Annotated[list[str], typer.Argument(help="Runs, by folder or name.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the run's folder.")] = None,
    evals: Annotated[
        list[Path] | None, typer.Option(metavar="JSON", help="A file that `megasharp eval` wrote; repeatable.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Serve the page on 127.0.0.1 instead; it refreshes.")] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --serve: 8042, or this one; 0 is any free port.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """Draw runs as one HTML file: curves, pass@k, candidates, responses, time. It needs no network."""
    from megasharp.reporting.report_command import PORT, serve_report, write_report

    collect_as_usual()
    if port is not None and not serve:
        raise UserError("--port is of a page that is served; add --serve, or leave it out")
    if out is not None and serve:
        raise UserError("--out is of a page that is written, and --serve writes none; leave one of them out")
    if serve:
        serve_report(names, runs, PORT if port is None else port, typer.echo, evals or [])
    else:
        typer.echo(f"report: {write_report(names, runs, out, evals or [])}")


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="A method's name; without one, all are listed.")] = "",
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/methods.md.")] = False,
) -> None:
    """List the methods that a recipe may name, or show one of them."""
    from rich.console import Console

    from megasharp.reporting.methods_command import describe_method, markdown_table, print_methods

    if markdown:
        typer.echo(markdown_table(), nl=False)
    elif name:
        typer.echo(describe_method(name))
    else:
        print_methods(Console())


@app.command(name="config")
def config_keys(
    key: Annotated[str, typer.Argument(help="A key, as policy.tp; without one, all with their defaults.")] = "",
    json_schema: Annotated[bool, typer.Option(help="Print a JSON schema of run files, for editors.")] = False,
) -> None:
    """Print the keys of a run file with their defaults, or what one key does."""
    from megasharp.config.key_texts import config_text

    typer.echo(config_text(key, json_schema=json_schema))


@app.command()
def toy(
    name: Annotated[str, typer.Argument(help="A study's name; without one, all are listed.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; each study has its own default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder, for studies that measure one.")] = None,
    out: Annotated[Path, typer.Option(help="The folder that gets NAME/ with the CSV files and the picture.")] = Path(
        "toys"
    ),
) -> None:
    """Run one of the papers' small studies; prints tables, writes CSV files and a picture."""
    from megasharp.studies.command import list_studies, run_study
    from megasharp.studies.study import Options

    collect_as_usual()
    if not name:
        typer.echo(list_studies())
        return
    for path in run_study(name, Options(seeds, seed, model), out):
        typer.echo(f"wrote {path}")


@runs_app.command("show")
def runs_show(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name.")],
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """One run on one screen: progress, goodput, restarts, checkpoints, resets, trends, warnings."""
    from rich.console import Console

    from megasharp.reporting.runs_command import show

    show(run, runs, Console())


@runs_app.command("compare")
def runs_compare(
    names: Annotated[list[str], typer.Argument(help="Two runs or more, by folder or name.")],
    runs: Annotated[Path, typer.Option(help="The folder that holds run folders.")] = Path("runs"),
    picture: Annotated[
        Path | None, typer.Option(help="The PNG of their curves; compare.png beside the first run.")
    ] = None,
) -> None:
    """Several runs: keys that differ, figures at equal steps and at the end, curves in one picture."""
    from rich.console import Console

    from megasharp.reporting.runs_command import compare

    typer.echo(f"picture: {compare(names, runs, picture, Console())}")


@runs_app.command("list")
def runs_list(
    folder: Annotated[Path, typer.Argument(help="The folder that holds run folders.")] = Path("runs"),
) -> None:
    """The runs in a folder, the latest first."""
    from rich.console import Console

    from megasharp.reporting.runs_command import show_list

    show_list(folder, Console())


@data_app.command("list")
def data_list() -> None:
    """The data sets that runs and suites may name, and the prompt templates."""
    from megasharp.tasks.data_command import list_sets

    list_sets(typer.echo)


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A data set's name.")],
    path: Annotated[Path | None, typer.Option(help="Its rows: a file or folder; without it, the hub's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Another prompt template.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many problems to print.")] = 3,
    model: Annotated[Path | None, typer.Option(help="A model's folder: its chat template and tokenizer.")] = None,
) -> None:
    """How many problems a data set has, how long they are, and the first ones as a model reads them."""
    from megasharp.tasks.data_command import show_set

    show_set(name, path, prompt, limit, model, typer.echo)


@data_app.command("decontaminate")
def data_decontaminate(
    train: Annotated[str, typer.Argument(help="The name of the data set that is trained on.")],
    against: Annotated[str, typer.Option(help="Suites that are evaluated, comma-separated.")],
    path: Annotated[Path | None, typer.Option(help="The set's rows: a file or folder; without it, the hub's.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Words in a row that make an overlap; 13 as in GPT-3.")] = 13,
    out: Annotated[Path | None, typer.Option(help="Write the rows without overlap: .jsonl, or a folder.")] = None,
) -> None:
    """Say which training problems overlap with which evaluated ones. Exit code 1: some do, and no --out was given."""
    from megasharp.evals.contamination import decontaminate

    suites = [name.strip() for name in against.split(",") if name.strip()]
    if decontaminate(train, path, suites, n, out, typer.echo) and out is None:
        raise typer.Exit(1)


@convert.command("hf-to-megatron")
def hf_to_megatron(
    source: Path,
    target: Path,
    tp: Annotated[int, typer.Option(help="Cut tensors where this many tensor-parallel ranks would.")] = 1,
    pp: Annotated[int, typer.Option(help="Give each of this many pipeline stages files of its own.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=f"Round the weights: {DTYPES}.")] = None,
) -> None:
    """Hugging Face folder SOURCE to a Megatron checkpoint folder TARGET, loadable at any TP x PP.

    --tp and --pp are hints: a load at that layout reads only what it needs.
    """
    from megasharp.learner.conversion import hf_to_megatron as run

    collect_as_usual()
    run(source, target, tp=tp, pp=pp, dtype=dtype)
    typer.echo(f"wrote {target}")


@convert.command("megatron-to-peft")
def megatron_to_peft(source: Path, target: Path) -> None:
    """The adapters in a run's checkpoint SOURCE (policy.lora) to a PEFT folder TARGET; megatron-to-hf merges them."""
    from megasharp.learner.conversion import megatron_to_peft as run

    collect_as_usual()
    run(source, target)
    typer.echo(f"wrote {target}")


@convert.command("megatron-to-hf")
def megatron_to_hf(
    source: Path,
    target: Path,
    dtype: Annotated[str | None, typer.Option(help=f"Round the weights: {DTYPES}; else as stored.")] = None,
) -> None:
    """Megatron checkpoint folder (or a run's checkpoint) SOURCE to a Hugging Face folder TARGET."""
    from megasharp.learner.conversion import megatron_to_hf as run

    collect_as_usual()
    run(source, target, dtype=dtype)
    typer.echo(f"wrote {target}")


@convert.command("verify")
def verify(
    one: Path,
    other: Path,
    tokens: Annotated[int, typer.Option(help="Length of the longest random sequence.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"What the logits are computed in: {DTYPES}.")] = "float32",
    logits: Annotated[
        bool, typer.Option(help="Compare logits too: holds one whole model in memory, in --dtype, then the other.")
    ] = True,
) -> None:
    """Compare two folders, of Hugging Face or of Megatron: arguments, tensors, logits.

    Exit code 0: the same model, bit for bit. 3: the same after rounding, one's weights are the other's rounded to its
    dtype, as --dtype of a conversion does. 1: they differ. 2: one cannot be read.
    """
    from megasharp.learner.verification import Probe
    from megasharp.learner.verification import verify as run

    collect_as_usual()
    found = run(one, other, Probe(tokens, seed, dtype) if logits else None)
    for line in found.lines:
        typer.echo(line)
    raise typer.Exit(found.exit_code)


def main() -> None:
    """Entry point of `megasharp`."""
    collect_seldom()
    run_command(app)


if __name__ == "__main__":
    main()
