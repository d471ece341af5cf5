"""The planner: what a run will need of each GPU and about how long a step takes, before a cluster is asked.

Pure: numbers in, numbers out. `formulas` holds every formula with its source, `hardware` the GPUs, `request` what is
asked, `result` what comes out; `memory`, `engines` and `seconds` apply the formulas, `problems` judges, `suggest`
searches, `text` prints, `tree` is the same for programs.
"""
