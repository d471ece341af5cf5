"""The learner as the loop sees it, over one or many ranks.

`learner` joins what ranks return; `inprocess` is one rank in this process, `processes` are ranks as child processes on
this machine, speaking over pipes, with gloo between them.
"""
