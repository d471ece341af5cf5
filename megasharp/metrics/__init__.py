"""Metrics of a run: computed from groups and tokens, logged, tabulated, timed, printed, and sent to trackers."""
