"""Ray: which rank and which engine sits where, and the processes that Ray starts there.

`layout` draws the slots, `capacity` compares them with what the cluster has, `session` starts or joins Ray and reserves
them, `ranks` and `engines` put thin actors into them. One driver; actors only start, watch and stop. Nothing here is
imported while `cluster.backend` is `local`.
"""
