"""Weights handed over inside one process: the engine copies what the learner yields."""

from __future__ import annotations

from megasharp.protocols import WeightSink, WeightSource


class InProcessSync:
    """Pushes every weight of the source to the sink under a new version."""

    def __init__(self, sink: WeightSink, version: int = -1) -> None:
        self._sink = sink
        self._version = version

    @property
    def version(self) -> int:
        """The version last pushed; -1 before the first."""
        return self._version

    def push(self, source: WeightSource) -> int:
        """Push all weights; returns the new version, one above the last."""
        self._sink.load_weights(self._version + 1, source.export_weights())
        self._version += 1
        return self._version
