"""From a configuration to a trained policy; the only package that knows every other part.

`resolve` decides whether a run can start, and says why not. `assembly` starts its parts, which `factories`,
`engine_setup`, `placement` and `reward_judge` make. `loop` is the training program, and `run` a whole run around it.
"""
