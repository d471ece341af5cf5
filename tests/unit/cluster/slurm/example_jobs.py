"""The jobs whose files lie in slurm/; run this file to write them anew after job.sbatch has changed."""

from __future__ import annotations

from pathlib import Path

from megasharp.cluster.slurm.job import Job, Resources, Software, render

SLURM = Path(__file__).parents[4] / "slurm"
_HOME = Path("/path/to")


_CACHE = "/path/to/huggingface"
_IMAGE = Software("python3", "/path/to/megasharp.sqsh", [f"{_CACHE}:{_CACHE}"])


def _job(name: str, run_file: str, nodes: int, software: Software) -> Job:
    run = (str(_HOME / run_file), "--runs", str(_HOME / "runs"))
    return Job(
        name=name,
        command=("train", *run, "--resume", "--retries", "3"),
        run=_HOME / "runs" / name,
        folder=_HOME,
        resources=Resources(nodes=nodes, time="24:00:00", gpus_per_node=8),
        software=software,
        doctor=run,
        environment={
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": _CACHE,
            "HF_HUB_CACHE": f"{_CACHE}/hub",
        },
    )


EXAMPLES = {
    "one_node.sbatch": _job("mine", "mine.yaml", 1, Software("/path/to/.venv-gpu/bin/python")),
    "four_nodes.sbatch": _job("mine", "mine.yaml", 4, _IMAGE),
}

if __name__ == "__main__":
    for file, job in EXAMPLES.items():
        (SLURM / file).write_text(render(job), encoding="utf-8")
