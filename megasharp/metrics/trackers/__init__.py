"""Trackers of a run, such as Weights & Biases: each has a process that follows metrics.jsonl and sends new rows.

metrics.jsonl is authoritative. A tracker reads it by itself, so nothing that it does or fails to do reaches the run,
and rows that could not be sent are sent by the next attempt. `trackers/` in the run folder records the run's id in the
tracker and the last step that was sent of each curve. decision 0039 compares this with wandb's own service.
"""
