"""Software of a node: versions in the trainer's Python, fused optimizers, and what is fused by them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

import torch

from megasharp.cluster.slurm.doctor.findings import Finding, Patient
from megasharp.common.errors import UserError
from megasharp.config.policy import AttentionName
from megasharp.ops.attention_kernels import Site, choose, software_here

# Packages whose versions change numbers, or without which nothing runs.
_PACKAGES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors")
_PACKAGES_ON_GPUS = ("nvidia-ml-py",)
# pip's requirement where a package's name alone is too little.
_REQUIREMENTS = {"transformer-engine": "transformer-engine[pytorch,core_cu13]"}
# An import of a library with kernels; on a cold shared disk it takes a minute.
_IMPORT_LIMIT_S = 300.0


def check_software(patient: Patient) -> Iterator[Finding]:
    """Yield the findings of this Python's packages."""
    summary, there = _summary("apex"), util.find_spec("transformer_engine") is not None
    names = (*_PACKAGES, *(_PACKAGES_ON_GPUS if patient.gpus_per_node else ()))
    # Without it layers are Megatron's local ones, unless the run file insists.
    names += ("transformer-engine",) if patient.gpus_per_node and (there or patient.transformer_engine is True) else ()
    yield from versions({name: _version(name) for name in names}, tested_versions(patient.constraints))
    spec = None if summary is None else util.find_spec("apex")
    folders = spec.submodule_search_locations or [] if spec else []
    modules = [path.stem for folder in folders for path in Path(folder).iterdir()]
    ours = "optimizers" in modules
    apex_failure = _import_failure("apex.optimizers") if ours else ""
    yield apex(summary, modules, apex_failure)
    engine = _import_failure("transformer_engine.pytorch.optimizers") if there else ""
    if engine:
        yield transformer_engine(engine)
    on_gpu, layers = patient.gpus_per_node > 0, patient.transformer_engine
    layers = there and (on_gpu if layers == "auto" else layers)
    yield from fused_paths(there and not engine, ours and not apex_failure, on_gpu, layers)
    yield attention_kernels(patient.attention, on_gpu)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _summary(name: str) -> str | None:
    try:
        return str(metadata.metadata(name)["Summary"])
    except metadata.PackageNotFoundError:
        # Built from its source into a folder on the path, it may have no metadata.
        return "" if util.find_spec(name) is not None else None


def _import_failure(module: str) -> str:
    """Return why Megatron cannot import its optimizers from there; empty where it can. It tries the same import.

    In a process of its own: such an import can end the process.
    """
    # Torch first, as in Megatron: Transformer Engine's library needs NCCL, which torch loads and it does not look for.
    command = [sys.executable, "-P", "-c", f"import torch\nfrom {module} import FusedAdam, FusedSGD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.strip().splitlines()[-1:]) or f"exit code {done.returncode}"


def tested_versions(text: str) -> dict[str, str]:
    """Return version by package, of a file of constraints. A line for another Python is left out."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)\s*(?:#.*)?$", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def versions(installed: Mapping[str, str | None], tested: Mapping[str, str]) -> list[Finding]:
    """Compare the packages that decide about numbers with those that the tests ran with; None is not installed."""
    found = []
    for name, version in installed.items():
        wanted = tested.get(name)
        plain = version.partition("+")[0] if version else None
        if version is None:
            wanted = _REQUIREMENTS.get(name, name)
            found.append(Finding("FAIL", "versions", f"{name} is not installed; pip install '{wanted}'"))
        elif wanted is not None and plain != wanted:
            found.append(Finding("note", "versions", f"{name} {version}; tested is {wanted} (constraints.txt)"))
        else:
            found.append(Finding("ok", "versions", f"{name} {version}"))
    return found


def apex(summary: str | None, modules: Sequence[str], failure: str) -> Finding:
    """Tell which package is called apex. `summary`: of the installed distribution, None where there is none.

    NVIDIA's has `apex.optimizers`; the one on PyPI is a web framework of that name. `failure`: why NVIDIA's cannot be
    imported, empty where it can.
    """
    if summary is None:
        return Finding("ok", "apex", "not installed, which is fine: NVIDIA's is used where it is")
    if "optimizers" not in modules:
        return Finding(
            "FAIL",
            "apex",
            f"this is PyPI's unrelated package ({summary or 'no summary'}), and Megatron would import it; "
            "pip uninstall apex",
        )
    if failure:
        return _not_imported("apex", failure)
    return Finding("ok", "apex", "NVIDIA's")


def transformer_engine(failure: str) -> Finding:
    """Report an installed Transformer Engine that cannot be imported because of `failure`."""
    return _not_imported("transformer-engine", failure)


def _not_imported(package: str, failure: str) -> Finding:
    """Megatron goes on without where the import says that something is missing, and ends at any other error."""
    return Finding(
        "FAIL",
        package,
        f"installed, but Megatron cannot import its optimizers ({failure}); build it for this torch, or pip uninstall "
        f"{package}",
    )


def fused_paths(transformer_engine: bool, nvidia_apex: bool, on_gpu: bool, layers: bool) -> list[Finding]:
    """Name the computations that are fused, and why.

    `transformer_engine`, `nvidia_apex`: Megatron can import optimizers from there. `layers`: those of the model are
    Transformer Engine's.
    """
    if transformer_engine or nvidia_apex:
        whose = "Transformer Engine's" if transformer_engine else "apex's"
        adam = f"{whose} fused one, because it is installed and can be imported"
    else:
        ours = "torch's fused kernel" if on_gpu else "torch's grouped operations"
        adam = f"{ours}, because neither Transformer Engine's nor NVIDIA apex's can be imported"
    where = "" if on_gpu else " (no GPU is used)"
    norms = (
        "Transformer Engine's, with the linear maps behind them (policy.transformer_engine)"
        if layers
        else "torch's rms_norm, because the layers are Megatron's local ones"
    )
    sums = (
        "in Transformer Engine's matrix products, in float32"
        if layers
        else "a kernel of its own, because the layers are Megatron's local ones"
    )
    swiglu = "one kernel of torch.compile's" if on_gpu else "torch's operations, because no GPU is used"
    return [
        Finding("ok", "fused", f"Adam: {adam}{where}"),
        Finding("ok", "fused", f"norms: {norms}"),
        Finding("ok", "fused", f"gradient accumulation: {sums}"),
        Finding("ok", "fused", f"activation: {swiglu}"),
    ]


def attention_kernels(wanted: AttentionName, on_gpu: bool) -> Finding:
    """Name the kernels that a run would take here in bfloat16, without its model; ranks try them when they start."""
    capability = torch.cuda.get_device_capability() if on_gpu and torch.cuda.is_available() else None
    site = Site(gpu=on_gpu, dtype="bfloat16", capability=capability)
    try:
        kernels = choose(wanted, site, software_here())
    except UserError as error:
        return Finding("FAIL", "fused", f"attention: {error}")
    return Finding("ok", "fused", f"attention: {kernels}")
