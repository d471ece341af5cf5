"""Slurm jobs: their sbatch files, the program of each node, and the checks before them (`megasharp doctor`)."""
