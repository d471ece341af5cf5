"""Trackers of a run, such as Weights & Biases: each a process that follows metrics.jsonl and sends what is new.

metrics.jsonl is what counts. A tracker reads it by itself, so nothing that one does or fails to do reaches the run, and
what was not sent while a service was away goes with the next attempt. The run's id there, and how far each curve has
come, lie in `trackers/` of the run folder.
"""
