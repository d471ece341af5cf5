"""A reward as TRL calls it: lists over responses, columns of the rows by name, None where it does not apply."""


def correct(completions, answer, level, **kwargs):
    """1 where the answer is the last word; it says nothing about rows without a level."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [
        None if row_level is None else float(text.split()[-1:] == [str(known)])
        for text, known, row_level in zip(texts, answer, level, strict=True)
    ]
