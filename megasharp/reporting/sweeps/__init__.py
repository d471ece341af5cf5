"""Sweeps: many runs from one file, resumable, on this machine or as a Slurm array, and the table of their results."""
