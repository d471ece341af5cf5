"""Weights from the learner to the engines: one versioned stream of (Hugging Face name, tensor) buckets.

`endpoints` hands them over inside one process. `fleet` pushes to a fleet of engines by one of five transports:

    shared_memory, disk        the driver writes what the learner yields; engines on the machine, or with the folder
    broadcast (gloo, nccl)     the learner's ranks send: `broadcast`
    ipc                        engines open the memory of the ranks beside them: `ipc`

`push` chooses one, `receivers` is what all of them ask of engines, `buckets` cuts and compares the stream, and
`colocation` knows who shares a device. A push either ends with
every living engine holding all of it, or fails; an engine that does not do its part is lost.
"""
