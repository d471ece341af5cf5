"""The one composition root: from a configuration to running parts.

`check` decides whether a run can start and says why not, `layout` describes it, `parts` makes the learner, engine,
stream and sync, `train` is a whole run from open folder to summary.
"""
