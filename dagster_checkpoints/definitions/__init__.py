"""What the plugin, and the command line beside it, read of Dagster's definitions and of a Dagster instance.

:mod:`pipelines` finds the pipelines of a code location, :mod:`instance` the parts of an instance that several machines may share.
"""
