"""`megasharp convert`: model folders of Hugging Face and Megatron, converted and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common.exit_codes import collect_as_usual

DTYPES = "float32, bfloat16 or float16"
convert = typer.Typer(no_args_is_help=True, help="Convert checkpoints between Hugging Face and Megatron.")


@convert.command()
def hf_to_megatron(
    source: Path,
    target: Path,
    tp: Annotated[int, typer.Option(help="Cut tensors where this many tensor-parallel ranks would.")] = 1,
    pp: Annotated[int, typer.Option(help="Give each of this many pipeline stages files of its own.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=f"Round the weights: {DTYPES}.")] = None,
) -> None:
    """Hugging Face SOURCE, a folder or OWNER/NAME[@REVISION], to a Megatron checkpoint folder TARGET for any TP x PP.

    --tp and --pp are hints: a load at that layout reads only what it needs.
    """
    from megasharp.config.hub import given_model
    from megasharp.learner.conversion import hf_to_megatron as run

    collect_as_usual()
    run(given_model(str(source)), target, tp=tp, pp=pp, dtype=dtype)
    typer.echo(f"wrote {target}")


@convert.command()
def megatron_to_peft(source: Path, target: Path) -> None:
    """The adapters in a run's checkpoint SOURCE (policy.lora) to a PEFT folder TARGET; megatron-to-hf merges them."""
    from megasharp.learner.conversion import megatron_to_peft as run

    collect_as_usual()
    run(source, target)
    typer.echo(f"wrote {target}")


@convert.command()
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


@convert.command()
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
