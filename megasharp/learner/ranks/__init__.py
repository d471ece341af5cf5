"""The learner as the training loop sees it, over one or many ranks.

`all_ranks` joins the ranks' results and holds the ranks of one process; `processes` starts ranks as child processes on
this machine, which are called over pipes. `cluster/ray_runtime/ranks.py` has the ranks of a Ray cluster.
"""
