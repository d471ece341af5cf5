"""The manifests for KubeRay and SkyPilot agree with the image and with what the trainer's own Ray has."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from megasharp.cluster.ray_runtime.process_environment import server_environment
from megasharp.cluster.slurm import node

REPOSITORY = Path(__file__).parents[3]
CONTAINERFILE = (REPOSITORY / "slurm" / "Containerfile").read_text(encoding="utf-8")


def manifest(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / "examples" / name).read_text(encoding="utf-8"))


def test_rays_processes_in_pods_are_set_up_as_the_trainers_own_are() -> None:
    spec = manifest("kuberay/cluster.yaml")["spec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    for pod in pods:
        (container,) = pod["containers"]
        given = {each["name"]: each["value"] for each in container["env"]}
        # KubeRay sets the mode, and Ray's servers are waited for by the operator.
        wanted = {**server_environment(0.0), "RAY_AUTH_MODE": None, "RAY_gcs_server_port_wait_time_s": None}
        assert {name: value for name, value in wanted.items() if value is not None}.items() <= given.items()
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']}\n" in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")


def test_skypilot_runs_the_nodes_program_with_the_images_python() -> None:
    task = manifest("skypilot/train.yaml")
    python = Path(task["envs"]["PYTHON"])
    assert f" PATH={python.parent}:" in CONTAINERFILE
    assert f"-m {node.__name__} --folder" in task["run"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
