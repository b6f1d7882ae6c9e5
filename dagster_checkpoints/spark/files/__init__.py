"""Files of the work directory: on file systems of this machine, or on any other that Spark's Hadoop client reaches."""
