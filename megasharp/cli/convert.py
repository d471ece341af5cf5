"""`megasharp convert`: model folders of Hugging Face and Megatron, converted and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common.exit_codes import collect_as_usual, status

READING = "loading Megatron-core, then reading {}"
DTYPES = "float32, bfloat16 or float16"
Target = Annotated[Path, typer.Argument(help="Folder to write; it must not exist yet.")]
convert = typer.Typer(no_args_is_help=True, help="Convert checkpoints between Hugging Face and Megatron.")


@convert.command("hf-to-megatron")
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder, or OWNER/NAME or OWNER/NAME@REVISION.")],
    target: Target,
    tp: Annotated[int, typer.Option(help="Number of tensor-parallel ranks to cut tensors for.")] = 1,
    pp: Annotated[int, typer.Option(help="Number of pipeline stages, each with files of its own.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=f"Round the weights to {DTYPES}.")] = None,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint folder, which loads at any TP x PP.

    --tp and --pp are hints: a load at that layout reads only what it needs.
    """
    status(READING.format(source))
    from megasharp.config.hub import given_model
    from megasharp.learner.conversion import hf_to_megatron as run

    collect_as_usual()
    run(given_model(str(source)), target, tp=tp, pp=pp, dtype=dtype)
    typer.echo(f"wrote {target}")


@convert.command("megatron-to-peft")
def megatron_to_peft(
    source: Annotated[Path, typer.Argument(help="Checkpoint of a run with policy.lora.")],
    target: Target,
) -> None:
    """Export a checkpoint's LoRA adapters as a PEFT folder; megatron-to-hf merges them into the model instead."""
    status(READING.format(source))
    from megasharp.learner.conversion import megatron_to_peft as run

    collect_as_usual()
    run(source, target)
    typer.echo(f"wrote {target}")


@convert.command("megatron-to-hf")
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(help="Megatron checkpoint folder, or a run's checkpoint.")],
    target: Target,
    dtype: Annotated[str | None, typer.Option(help=f"Round the weights to {DTYPES}. Without it: as stored.")] = None,
) -> None:
    """Convert a Megatron checkpoint folder to a Hugging Face folder."""
    status(READING.format(source))
    from megasharp.learner.conversion import megatron_to_hf as run

    collect_as_usual()
    run(source, target, dtype=dtype)
    typer.echo(f"wrote {target}")


@convert.command("verify")
def verify(
    one: Annotated[Path, typer.Argument(help="Model folder of Hugging Face or Megatron.")],
    other: Annotated[Path, typer.Argument(help="The folder to compare with it.")],
    tokens: Annotated[int, typer.Option(help="Length of the longest random sequence.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"Dtype of the logits: {DTYPES}.")] = "float32",
    logits: Annotated[bool, typer.Option(help="Compare logits too, with one whole model in memory at a time.")] = True,
) -> None:
    """Compare two model folders: arguments, tensors, logits.

    Exit code 0: the same model, bit for bit.

    Exit code 3: the same after rounding one's weights to the other's dtype, as --dtype of a conversion does.

    Exit code 1: they differ. Exit code 2: one cannot be read.
    """
    status(READING.format(f"{one} and {other}"))
    from megasharp.learner.verification import Probe
    from megasharp.learner.verification import verify as run

    collect_as_usual()
    found = run(one, other, Probe(tokens, seed, dtype) if logits else None)
    for line in found.lines:
        typer.echo(line)
    raise typer.Exit(found.exit_code)
