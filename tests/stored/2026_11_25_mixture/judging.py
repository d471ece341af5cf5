def brief(text, answer):
    return 1.0 if len(text) < len(answer) + 3 else 0.25
