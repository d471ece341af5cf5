"""Ray: the places of ranks and engines in a cluster, and the processes that Ray starts there.

`slot_layout` draws the slots and compares them with the cluster's capacity; `session` starts or joins Ray, `slots`
reserves them; `ranks` with `rank_actor`, and `engine_actors`, put thin actors into them. `reaper` cleans up after a
driver that was killed, `environment` has Ray's variables. One driver; actors only start, watch and stop. Nothing here
but the layout is imported while `cluster.backend` is `local`.
"""
