"""A sink for Kafka topics: rows are staged as messages in files, and sent in one Kafka transaction after the checkpoint.

Read :mod:`target` first, then :mod:`transactions` (one Kafka transaction for messages and ledger), :mod:`topics`
and :mod:`messages` (rows as messages, and where they wait). :mod:`cluster` holds the clients and their errors.
"""
