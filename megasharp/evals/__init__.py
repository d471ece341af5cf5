"""Evaluation: unbiased pass@k of any engine over fixed suites of problems."""
