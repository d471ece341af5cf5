"""A reward as verl calls it: a number, or a table with `score`, whose other numbers are logged."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """1 where the answer is the last word."""
    right = solution_str.split()[-1:] == [str(ground_truth)]
    return {"score": float(right), "words": len(solution_str.split())}
