"""Examples at the end of every command's `--help`."""

from __future__ import annotations

# By command: what follows `megasharp`, and what it does.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "quickstart": (("quickstart --out first", "then: megasharp train first/run.yaml"),),
    "train": (
        ("train my.yaml --dry-run", "check the file and show what would run"),
        ("train my.yaml", "train into runs/NAME"),
        ("train my.yaml name=b policy.optimizer.lr=2e-6", "another run, with two keys overridden"),
        ("train my.yaml --resume", "continue after the newest checkpoint"),
    ),
    "sweep": (
        ("sweep grid.yaml --plan", "what the runs cost, in GPU-hours"),
        ("sweep grid.yaml --dry-run", "list the runs"),
        ("sweep grid.yaml --at-once 2", "run them, two at a time"),
        ("sweep grid.yaml --results", "table, CSV file and picture"),
    ),
    "submit": (
        ("submit my.yaml --dry-run", "print the sbatch file"),
        ("submit my.yaml --partition gpu --time 4:00:00", "submit it"),
        ("submit my.yaml --eval countdown_test", "evaluate the run's newest checkpoint in a job"),
    ),
    "config": (
        ("config", "all keys with their defaults"),
        ("config policy.tp", "type, default and meaning of one key"),
        ("config --from-verl run.sh", "verl's overrides as a run file"),
    ),
    "methods": (("methods", "all methods"), ("methods casp", "formula, parameters and paper of one")),
    "plan": (
        ("plan my.yaml --gpu h100", "memory and time on H100s"),
        ("plan my.yaml --nodes 4 --suggest", "the best three layouts for four nodes"),
    ),
    "doctor": (("doctor", "check this machine"), ("doctor my.yaml", "check also what this run needs")),
    "data list": (("data list", ""),),
    "data show": (
        ("data show gsm8k", "a known data set"),
        ("data show my.jsonl --prompt-key question --answer-key answer", "rows of your own"),
        ("data show my.yaml", "the data of a run, as its model reads them"),
    ),
    "data decontaminate": (("data decontaminate gsm8k --against math500 --out clean.jsonl", ""),),
    "eval": (
        ("eval runs/mine --suite countdown_test --n 256 --k 1,4,16,...,256", "a run's newest checkpoint"),
        ("eval Qwen/Qwen2.5-0.5B --suite gsm8k_test", "a model from the hub"),
        ("eval --compare one.json other.json --problems", "two results, problem by problem"),
        ("eval --compare a1.json a2.json a3.json --with b1.json b2.json b3.json", "two methods of several runs"),
    ),
    "probe": (("probe mine --problems 64", "then: megasharp report mine"),),
    "report": (("report mine other", "two runs in one file"), ("report mine --serve", "while it trains")),
    "runs list": (("runs list", ""),),
    "runs show": (("runs show mine", ""),),
    "runs compare": (("runs compare mine other", ""),),
    "convert hf-to-megatron": (("convert hf-to-megatron Qwen/Qwen2.5-0.5B base --tp 2", ""),),
    "convert megatron-to-hf": (("convert megatron-to-hf runs/mine/checkpoints/step_000300 exported", ""),),
    "convert megatron-to-peft": (("convert megatron-to-peft runs/mine/checkpoints/step_000300 adapters", ""),),
    "convert verify": (("convert verify base exported", ""),),
    "toy": (("toy", "all studies"), ("toy squeeze --seeds 3", "run one with three seeds")),
}


def epilog(command: str) -> str:
    """Return a command's examples: each on a line, its meaning indented below it."""
    lines = EXAMPLES[command]
    told = [f"megasharp {line}" + (f"\n    {meaning}" if meaning else "") for line, meaning in lines]
    return "\n".join((f"Example{'s' if len(lines) > 1 else ''}:", *told))
