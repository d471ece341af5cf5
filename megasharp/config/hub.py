"""Models by name: a folder on this machine, or else a repository of the Hugging Face hub, by way of its cache.

`HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` mean what they mean to huggingface_hub, whose cache this is.
Only the command that a user gives reaches for the hub: ranks and engines get folders, jobs have `job_variables`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from megasharp.common.environment_variables import variables
from megasharp.common.errors import NotAtHand, UserError, one_line
from megasharp.common.exit_codes import note
from megasharp.config.core import find

# An owner and a name, as the hub writes them.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(.+?)--(.+)")
_WORDS = ["*.json", "*.jinja", "*.model", "*.txt"]
# Folders within repositories hold other forms of the same weights, and so do Mistral's consolidated files.
_OTHER_FORMS = ["*/*", "consolidated*"]
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Of an answer of the hub as a whole; its libraries would wait for minutes, once for each of its addresses.
_ANSWER_S = 5.0
T = TypeVar("T")
# Why `go_offline` was called, if it was.
_left: list[str] = []


def is_hub_id(path: str) -> bool:
    """Return whether a path that does not exist reads as a repository's id. Example: "Qwen/Qwen2.5-0.5B"."""
    return _ID.fullmatch(path) is not None


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit's whole hash, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def hub_is_off() -> bool:
    """Return whether the environment, or `go_offline`, keeps this process from the hub, as huggingface_hub reads it."""
    wanted = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return wanted.upper() in {"1", "ON", "YES", "TRUE"}


def go_offline(why: str) -> None:
    """Keep this process, and those that it starts, from a hub that cannot be reached: nothing waits for it again."""
    from huggingface_hub import constants

    _left.append(why)
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    # It has a copy of that, made when it is imported.
    if (data := sys.modules.get("datasets.config")) is not None:
        vars(data)["HF_HUB_OFFLINE"] = True


def absence() -> str:
    """Say why only the hub's cache is read, and what to do about it."""
    if _left:
        return f"the hub cannot be reached ({_left[0]}): check the network, HF_ENDPOINT and proxies"
    return "the hub is off (HF_HUB_OFFLINE): unset it where there is a network"


@contextmanager
def read_as_a_job(given: Mapping[str, str], mounts: Sequence[str] = ()) -> Iterator[None]:
    """Let this process read the hub by a job's variables that it does not have itself, as the job does.

    A path in a container is read where its `mounts` ("/from:/to") take it from. Every job has HF_HUB_OFFLINE, which
    says nothing of this machine.
    """
    from huggingface_hub import constants

    of_hub = (name for name in given if name.startswith("HF_") and name != "HF_HUB_OFFLINE")
    missing = {name: _outside(given[name], mounts) for name in of_hub if not os.environ.get(name)}
    if not missing:
        yield
        return
    try:
        with variables(missing):
            # The library reads its variables when it is imported, which it is by now.
            importlib.reload(constants)
            yield
    finally:
        importlib.reload(constants)


def _outside(path: str, mounts: Sequence[str]) -> str:
    for mount in mounts:
        source, _, target = mount.partition(":")
        target = target.partition(":")[0]
        if path.startswith("/") and target and Path(path).is_relative_to(target):
            return str(source / Path(path).relative_to(target))
    return path


def job_variables() -> dict[str, str]:
    """Return the variables by which a job on another machine finds this one's caches, and stays away from the hub."""
    from huggingface_hub import constants

    caches = {"HF_HOME": constants.HF_HOME, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    if data := os.environ.get("HF_DATASETS_CACHE"):
        caches["HF_DATASETS_CACHE"] = data
    return {"HF_HUB_OFFLINE": "1", **{name: os.path.abspath(path) for name, path in caches.items()}}  # noqa: PTH100


def cache_mounts() -> list[str]:
    """Return the folders of `job_variables` as a container's mounts, each under its own name, none within another."""
    folders = {name: Path(path) for name, path in job_variables().items() if name != "HF_HUB_OFFLINE"}
    home = folders["HF_HOME"]
    # A folder that does not exist cannot be mounted; of these only the home may be missing, with caches elsewhere.
    if not home.is_dir() and not folders["HF_HUB_CACHE"].is_relative_to(home):
        del folders["HF_HOME"]
    return [f"{each}:{each}" for each in sorted({*folders.values()}) if not {*folders.values()} & {*each.parents}]


def hub_model(folder: Path) -> tuple[str, str] | None:
    """Return the id and the commit of a model that lies in the hub's cache; None for another folder."""
    name = _CACHED.fullmatch(folder.parent.parent.name)
    if name is None or folder.parent.name != "snapshots":
        return None
    return f"{name[1]}/{name[2]}", folder.name


def given_model(text: str, *, weights: bool = True) -> Path:
    """Return the folder of a model named in a command: a path, or a hub's id with its revision: OWNER/NAME@REVISION.

    Without `weights` as `model_place`, whose UserError is raised.
    """
    name, _, revision = text.partition("@")
    if Path(text).exists() or not is_hub_id(name):
        return Path(text)
    return model_place(name, revision or None, weights=weights)


def model_place(
    path: str,
    revision: str | None = None,
    *,
    commit: str | None = None,
    weights: bool = True,
    check: Callable[[Path], object] = Path,
) -> Path:
    """Return the folder of a model: what is found by this path, or else the hub's, fetched where the cache lacks it.

    Without `weights` the folder has config.json and the tokenizer at least. `commit` is the one to stay at, wherever
    the revision has moved; then a note says so. `check` gets the folder before weights are fetched into it, to refuse
    what its config.json says. A path that is neither is returned as written.

    Raises:
        NotAtHand: the hub is off, cannot be reached, or does not let us in, and the cache does not have the model.
        UserError: there is no such repository or revision, or it has no safetensors weights.
    """
    found = find(path)
    if found.exists() or not is_hub_id(path):
        if revision is not None:
            where = "is a folder here" if found.exists() else "is no id of the hub (OWNER/NAME)"
            raise UserError(f"{path} {where}, which has no revision {revision!r}; leave the revision out")
        return found
    was_off = hub_is_off()
    if not was_off:
        try:
            _fetch(path, revision, commit, weights, check)
        except NotAtHand as refused:
            # A gated model that was fetched with another token is as good as any.
            if _in_cache(path, commit or revision, weights) is None:
                raise
            note(f"{refused}; it is read from the hub's cache")
    folder = _in_cache(path, commit or revision, weights)
    if folder is None:
        from huggingface_hub import constants

        what = "it" if weights else "its config.json and tokenizer"
        raise NotAtHand(
            f"{path} is no folder here, the hub's cache ({constants.HF_HUB_CACHE}) does not have {what}, and "
            f"{absence()}, or name a folder"
        )
    if hub_is_off() and not was_off:
        note(f"{absence()}; {path} is read from the hub's cache: {folder.name}")
    return folder


def cached_model(path: str, revision: str | None = None) -> Path | None:
    """Return the folder that the cache has of a hub's model, weights or not; None where it has none."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, revision=revision, allow_patterns="config.json", local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _in_cache(path: str, revision: str | None, weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            path,
            revision=revision,
            allow_patterns=_patterns(weights),
            ignore_patterns=_OTHER_FORMS,
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(folder) if (Path(folder) / "config.json").is_file() else None


def _patterns(weights: bool) -> list[str]:
    return [*_WORDS, *(["*.safetensors"] if weights else [])]


def _fetch(path: str, revision: str | None, commit: str | None, weights: bool, check: Callable[[Path], object]) -> None:
    """Bring into the cache what it lacks of a model; an unreachable hub is left for good, with a note."""
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache

    try:
        about: Any = answer_of(lambda: HfApi().model_info(path, revision=revision, files_metadata=True))
        if commit is not None and about.sha != commit:
            note(f"{path}: {revision or 'main'} has moved to {about.sha}; the run stays at {commit}")
            if _in_cache(path, commit, weights) is not None:
                return
            about = answer_of(lambda: HfApi().model_info(path, revision=commit, files_metadata=True))
        names = [each.rfilename for each in about.siblings]
        if weights and not any(name in names for name in _WEIGHTS):
            other = next((name for name in names if name.endswith((".bin", ".gguf", ".pth", ".pt"))), "no weights")
            raise UserError(f"{path} has no safetensors weights (it has {other}): name another repository or revision")
        patterns = _patterns(weights)
        lacks = [
            each
            for each in about.siblings
            if _wanted(each.rfilename, patterns)
            and not isinstance(try_to_load_from_cache(path, each.rfilename, revision=about.sha), str)
        ]
        if weights and any(each.rfilename.endswith(".safetensors") for each in lacks):
            check(
                Path(snapshot_download(path, revision=about.sha, allow_patterns=_WORDS, ignore_patterns=_OTHER_FORMS))
            )
        if lacks:
            size = sum(each.size or 0 for each in lacks)
            note(
                f"{path} at {about.sha[:12]}: {len(lacks)} files, {size / 1e6:,.1f} MB, are fetched from "
                f"{constants.ENDPOINT} into {constants.HF_HUB_CACHE}"
            )
        snapshot_download(
            path, revision=commit or revision, allow_patterns=patterns, ignore_patterns=_OTHER_FORMS, etag_timeout=5
        )
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds
        _judge(path, revision, error)


def _wanted(name: str, patterns: list[str]) -> bool:
    from huggingface_hub.utils._paths import filter_repo_objects

    return any(filter_repo_objects([name], allow_patterns=patterns, ignore_patterns=_OTHER_FORMS))


def answer_of(ask: Callable[[], T]) -> T:
    """Return what the hub answers. Raises TimeoutError after 5 seconds, whatever the network does."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(_ANSWER_S)


def _judge(path: str, revision: str | None, error: Exception) -> None:
    """Raise the one line that an error of huggingface_hub's means, or go offline where the hub cannot be reached."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{path}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.GatedRepoError():
            raise NotAtHand(
                f"{path} is gated: ask for access at {page}, then set HF_TOKEN (or `hf auth login`)"
            ) from None
        case errors.RepositoryNotFoundError():
            raise UserError(
                f"{path} is no folder here and no repository at {constants.ENDPOINT} that you may read: check the "
                "name (OWNER/NAME), or set HF_TOKEN where it is a private one"
            ) from None
        case errors.RevisionNotFoundError():
            raise UserError(f"{path} has no branch, tag or commit {revision!r}: see {page}/tree/main") from None
        case _ if status in (401, 403):
            raise NotAtHand(f"{path}: {constants.ENDPOINT} does not let you in ({status}): set HF_TOKEN") from None
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        raise UserError(
            f"{path} cannot be written into the cache {constants.HF_HUB_CACHE}: {one_line(error)}"
        ) from None
    within = f"no answer within {_ANSWER_S:g} s" if isinstance(error, TimeoutError) else one_line(error)[:120]
    go_offline(f"{constants.ENDPOINT}: {within}")
