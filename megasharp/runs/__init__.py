"""Run folders read back: one on a screen, several side by side, a list. Nothing here writes into a run."""
