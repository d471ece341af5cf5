"""Slurm jobs of releases before 0.2, which name modules of this package."""
