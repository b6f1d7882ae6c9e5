"""A file somewhere: one interface to S3 and to local directories. Knows keys and bytes; must not know checkpoints or sinks."""
