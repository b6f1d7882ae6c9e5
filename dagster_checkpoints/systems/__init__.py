"""Clients and dialects of databases and table formats, which sinks and sources share. Must not know transactions of a sink."""
