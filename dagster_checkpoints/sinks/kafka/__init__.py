"""A sink for Kafka topics: rows are staged as messages in files, and sent in one Kafka transaction after the checkpoint.

Read :mod:`target` first, then :mod:`transactions` (one Kafka transaction for messages and ledger), :mod:`ledger_topic`,
:mod:`staging` and :mod:`messages` (rows as messages). :mod:`cluster` holds the clients and their errors.
"""
