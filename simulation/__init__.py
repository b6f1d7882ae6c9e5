"""A simulator that tries to break the protocol: whole pipelines over the real state machines, with everything going wrong."""
