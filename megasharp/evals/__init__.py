"""Evaluation: unbiased pass@k of any engine over fixed suites of problems.

`suites` and `groups` say what is measured, `evaluate` samples it, `judging` judges beside it, `sample_store` keeps the
samples that `stored_samples` reads back, `samples` counts, `estimators` has the formulas; `result` and `result_files`
are the outcome in memory and on disk, `compare` sets two side by side, `crossed` decides between methods of several
runs. `probe` and `contamination` are studies of their own.
"""
