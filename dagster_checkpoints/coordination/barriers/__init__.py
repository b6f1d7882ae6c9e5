"""When a task takes its snapshot: the barriers on its input channels.

There is one handler per task; the gate in front of the task's channels feeds it events and performs its actions in the
order given. Read `events` (events and actions), `single` (exactly-once: one checkpoint at a time, aligned or
not), `tracking` (at-least-once), `creation` (the handler for the settings). The channels of static inputs take part
like any other: otherwise a consumer whose other inputs have ended would get no barrier. A static input that is not ready
blocks no barrier either: the records of it that have arrived are in-flight data.

Must not know: records, channels' storage, snapshots, clocks.

Source: PROTOCOL section 4; FLIP-76 (unaligned checkpoints); FLIP-147, "Make CheckpointBarrierHandler Support
EndOfPartition"; Flink's SingleCheckpointBarrierHandler and CheckpointBarrierTracker.
"""
