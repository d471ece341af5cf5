"""Changes of an engine to SGLang, in each of its processes; `server_patches.py` has those of its server alone.

1. `Sampler`: ours, registered under the built-in back-ends' names.
2. `SamplingBatchInfo`: its three methods meant for it, and the copy made for a forward, carry `requests.Columns`.
3. `SamplingParams.verify`: also judges `custom_params`, in the server, where a mistake is an answer and not a crash.
4. `WeightUpdater.update_weights_from_tensor`: a refusal of ours becomes (False, reason) instead of the engine's end.
   `WeightUpdater.receive_weights_from_distributed`: refuses tensors that were not announced.
5. `SchedulerWeightUpdaterManager.update_weights_from_disk`: refuses an older version, and weights that do not fit.
6. `WeightChecker._compute_checksum`: checksums of whole tensors under their checkpoint's names. SGLang's own hashes its
   fused, cut tensors, with a hash of its own, and needs CUDA.
7. `ModelConfig._derive_hybrid_model`: `num_attention_layers` counts the memory network's layers, which are no hidden
   layers of the model that the configuration describes. Where the memory has a window, its layers are named as those
   with a pool of their own (`memory_pool.py`, which lists what it replaces for that).
8. `Scheduler._poll_timeout_aborts`: ends requests by limits of their own. SGLang's own limits
   (SGLANG_REQ_RUNNING_TIMEOUT, SGLANG_REQ_WAITING_TIMEOUT) are answered with status 503, without the tokens.
9. The names of shared memory: all that an engine's processes share in /dev/shm carries one name, by which whoever
   stops the engine removes it. SGLang ends its processes by force, which leaves their semaphores, message queues and
   load figures behind.
10. `RoutedExpertsCapturer.get_topk`: the experts of a request's tokens, in one or two bytes each; SGLang's own have
   four. `ALLOC_MEMORY_FUNCS`: on a CPU, memory for them that is not pinned, which needs CUDA.

And of torch: where ranks meet (`rendezvous.py`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasharp.rollout.sglang.engine import memory_pool, sglang_internals
from megasharp.rollout.sglang.engine.engine_config import EngineSettings, published
from megasharp.rollout.sglang.engine.receive import check_broadcast, check_folder, checksums, known
from megasharp.rollout.sglang.engine.rendezvous import meet_at_one_address
from megasharp.rollout.sglang.engine.requests import Columns, check_request, columns_of, overdue
from megasharp.rollout.sglang.engine.sampler import EngineSampler


def name_all_that_is_shared(folder: Path) -> None:
    """Put shared files in `folder`, here and in child processes; what cannot be in a folder begins with its name."""
    process: Any = multiprocessing.current_process()
    # Name prefix of multiprocessing's semaphores, inherited by children.
    process._config["semprefix"] = f"/{folder.name}"
    sglang_internals.stale_shm_cleanup._SGL_SHM_PREFIX = folder.name
    sglang_internals.load_snapshot.shm_path_for = lambda instance: str(folder / f"loads_{instance}")


# A scheduler polls at each of its steps.
_LOOK_S = 0.05
_SAMPLING_BACKENDS = ("pytorch", "flashinfer")


def apply() -> None:
    """Make the changes in this process, once. Raises KeyError where no engine of ours published its settings."""
    if hasattr(sglang_internals.SamplingBatchInfo, "megasharp"):
        return
    meet_at_one_address()
    shared = published().shared
    if shared is not None:
        name_all_that_is_shared(Path(shared))
    for backend in _SAMPLING_BACKENDS:
        sglang_internals.register_sampler_backend(backend, EngineSampler)
    _carry_columns(sglang_internals.SamplingBatchInfo)
    _judge_requests(sglang_internals.SamplingParams, published().memory is not None)
    _answer_refusals(sglang_internals.WeightUpdater)
    _take_announced_only(sglang_internals.WeightUpdater)
    _check_folders(sglang_internals.SchedulerWeightUpdaterManager)
    _name_checksums(sglang_internals.WeightChecker)
    _count_attention_layers(sglang_internals.ModelConfig, published())
    memory_pool.apply(published())
    _keep_limits(sglang_internals.Scheduler)
    if published().experts is not None:
        _narrow_experts(sglang_internals.RoutedExpertsCapturer, getattr(torch, str(published().experts)))


def _count_attention_layers(config: Any, settings: EngineSettings) -> None:
    if settings.memory is None:
        return
    derive: Callable[[Any], None] = config._derive_hybrid_model

    def derived(self: Any) -> None:
        derive(self)
        policy_layers = self.num_attention_layers
        self.num_attention_layers += settings.memory_layers
        if settings.memory_window is not None:
            self.is_hybrid_swa = True
            self.full_attention_layer_ids = list(range(policy_layers))
            self.swa_attention_layer_ids = list(range(policy_layers, self.num_attention_layers))

    config._derive_hybrid_model = derived


def _carry_columns(info: Any) -> None:
    copy_for_forward: Callable[[Any], Any] = info.copy_for_forward

    def start(self: Any, batch: Any, vocab_size: int) -> None:
        self.megasharp = columns_of(batch.reqs, self.device)

    def keep(self: Any, keep_indices: list[int], keep_indices_device: Tensor) -> None:
        self.megasharp = self.megasharp.select(keep_indices_device)

    def merge(self: Any, other: Any) -> None:
        self.megasharp = self.megasharp.followed_by(other.megasharp)

    def copy(self: Any) -> Any:
        # It goes through dataclasses.replace, which knows declared fields only.
        copied = copy_for_forward(self)
        copied.megasharp = self.megasharp
        return copied

    absent: Columns | None = None
    info.megasharp = absent
    info.adjusted_from_schedule_batch = start
    info.adjusted_filter_batch = keep
    info.adjusted_merge_batch = merge
    info.copy_for_forward = copy


def _judge_requests(params: Any, has_memory: bool) -> None:
    verify: Callable[[Any, int], None] = params.verify

    def judge(self: Any, vocab_size: int) -> None:
        verify(self, vocab_size)
        check_request(self.custom_params, has_memory)

    params.verify = judge


def _keep_limits(scheduler: Any) -> None:
    poll: Callable[[Any], list[Any]] = scheduler._poll_timeout_aborts

    def polled(self: Any) -> list[Any]:
        aborts, now = poll(self), time.perf_counter()
        if now - self.megasharp_looked < _LOOK_S:
            return aborts
        self.megasharp_looked = now
        late = overdue(self.waiting_queue, self.collect_inflight_reqs(), now)
        # Without a message they end as our own aborts do: with their tokens.
        return [*aborts, *(sglang_internals.AbortReq(rid=name) for name in late)]

    scheduler.megasharp_looked = 0.0
    scheduler._poll_timeout_aborts = polled


def _narrow_experts(capturer: Any, narrow: torch.dtype) -> None:
    routed: Callable[..., Tensor] = capturer.get_topk

    def narrowed(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return routed(self, *args, **kwargs).to(narrow)

    def plain(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    capturer.get_topk = narrowed
    sglang_internals.ALLOC_MEMORY_FUNCS["cpu"] = plain


def _answer_refusals(updater: Any) -> None:
    update: Callable[..., tuple[bool, str]] = updater.update_weights_from_tensor

    def answer(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        # All ranks read the same file, so they refuse together and none waits for another.
        try:
            return update(self, *args, **kwargs)
        except (ValueError, OSError) as error:
            return False, str(error)

    updater.update_weights_from_tensor = answer


def _take_announced_only(updater: Any) -> None:
    receive: Callable[..., Any] = updater.receive_weights_from_distributed

    def answer(self: Any, *, names: Any, dtypes: Any, shapes: Any, **kwargs: Any) -> Any:
        # The caller turns an exception raised here into (False, reason).
        check_broadcast(self.get_model(), names, dtypes, shapes)
        return receive(self, names=names, dtypes=dtypes, shapes=shapes, **kwargs)

    updater.receive_weights_from_distributed = answer


def _check_folders(manager: Any) -> None:
    update: Callable[[Any, Any], Any] = manager.update_weights_from_disk

    def answer(self: Any, request: Any) -> Any:
        try:
            model = self.tp_worker.model_runner.model
            check_folder(model, Path(request.model_path), request.weight_version)
        except ValueError as error:
            return sglang_internals.UpdateWeightFromDiskReqOutput(
                success=False, message=str(error), num_paused_requests=0
            )
        return update(self, request)

    manager.update_weights_from_disk = answer


def _name_checksums(checker: Any) -> None:
    compute: Callable[..., dict[str, Any]] = checker._compute_checksum

    def answer(self: Any, skip_tensor_list: list[str] | None = None, *, role: str) -> dict[str, Any]:
        model = self._get_model()
        if not known(model):
            return compute(self, skip_tensor_list, role=role)
        found = checksums(model)
        info = sglang_internals.ChecksumInfo(
            checksums=found,
            per_gpu_checksum=sglang_internals.overall_checksum(found),
            parallelism_info=self._parallelism_info(role=role),
        )
        described: dict[str, Any] = info.model_dump()
        return described

    checker._compute_checksum = answer
