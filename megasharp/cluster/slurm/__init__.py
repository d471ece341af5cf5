"""Slurm jobs: what is given to sbatch, what each node runs, and what is looked at before (`megasharp doctor`)."""
