"""The resources of the flights code location: Spark, storage and the checkpoint coordinator."""
