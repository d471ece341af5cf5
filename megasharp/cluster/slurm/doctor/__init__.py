"""`megasharp doctor`: the checks of what a run expects of a node.

`examine.py` has their order. A check is a pure function of what was read, so that tests need no GPU. `devices.py` has
GPUs and driver, `software.py` and `engines.py` both Pythons, then `memory.py`, `filesystem.py` and `network.py`.
`meeting.py` is what nodes try together, `all_reduce.py` a program of one rank.
"""
