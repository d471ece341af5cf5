"""The planner: a run's memory on each GPU and about the seconds of a step, before a cluster is asked.

Pure: numbers in, numbers out. In the order of reading: `request` is the question, with the GPUs that are known;
`formulas` holds every formula with its source, `mixtures` those of experts; `memory` and `seconds` apply them;
`plan_result` is the answer and `warnings` judges it; `suggest` makes a plan and searches for better layouts; `text`
prints a plan, `tree` is the same for programs.
"""
