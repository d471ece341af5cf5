"""MLflow: server and credentials are the library's own (MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, ...)."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from megasharp.config.core import flat
from megasharp.metrics.trackers.follow import Described, Row


class MlflowRun:
    """A run of an experiment, which is created if missing. Names are those of metrics.jsonl, except for `@` and `+`."""

    def __init__(self, described: Described, known: str | None) -> None:
        self._client = MlflowClient()
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(described.project)
        experiment = found.experiment_id if found else self._client.create_experiment(described.project)
        self.id = str(self._client.create_run(experiment, run_name=described.name).info.run_id)
        params = [Param(name, str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in flat(described.config)]
        for begin in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(self.id, params=params[begin : begin + MAX_PARAMS_TAGS_PER_BATCH])

    def log(self, rows: Sequence[Row]) -> None:
        """Send each value with the time of its row."""
        metrics = []
        for row in rows:
            for name, value in row.values.items():
                # MLflow's names have no `@` and no `+`.
                allowed = name.replace("@", "_at_").replace("+", "_with_")
                metrics.append(Metric(allowed, value, int(1000 * row.time), row.step))
        for begin in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + MAX_METRICS_PER_BATCH])

    def close(self) -> None:
        """Mark the run as finished, until an attempt continues it."""
        self._client.set_terminated(self.id)
