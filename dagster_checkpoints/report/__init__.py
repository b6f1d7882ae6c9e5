"""The page of checkpoints: what a pipeline's runs did, as one HTML file without a server, and the same numbers as JSON.

Read in this order: :mod:`values` (what the page shows), :mod:`building` (from the history and the status of the pipeline, as
values and as the file; its HTML, CSS and JavaScript are in ``parts/``). The command `dagster-checkpoints report` writes it, and
every run while it lives.
"""
