"""How weights travel from the learner to the engines: one versioned stream of (Hugging Face name, tensor) buckets.

`inprocess` hands them over inside one process. `fleet` pushes to a fleet of engines by one of five transports:

    shared_memory, disk        the driver writes what the learner yields; engines on the machine, or with the folder
    broadcast (gloo, nccl)     the learner's ranks send; `broadcast` is the driver's half, `broadcast_rank` the ranks'
    ipc                        engines open the memory of the ranks beside them; `ipc`, `ipc_rank`, `lend_rank`

`receivers` is what all of them have engines do, `buckets` how the stream is cut and compared. A push either ends with
every living engine holding all of it, or fails; an engine that does not do its part is lost.
"""
