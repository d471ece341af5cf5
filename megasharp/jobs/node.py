"""`python -m megasharp.jobs.node`: the program that job files rendered before 0.2 start. Removed in the release after.

Slurm requeues a job by the file that it was submitted with, for days or weeks: such a file names this module.
"""

from megasharp.cluster.slurm.node import main
from megasharp.common.exit_codes import run_command

if __name__ == "__main__":
    run_command(main)
