"""The scoreboard of claims: each claim of the four papers, its test here, and the verdict. It writes docs/claims.md.

Claims are in the YAML files beside this one, one a paper. `claims.py` reads them, `verdicts.py` holds them against the
studies and the frontier study, `page.py` formats the page.
"""
