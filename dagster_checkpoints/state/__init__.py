"""The content of a checkpoint. Read `metadata` (the values), `metadata_file` (their versioned form) and `recording` (the record
of a layout); then `restore` (the rules of a restore, in order) with `fitted_checkpoint` (the value that they take and
rewrite), and the rules in `stage_names`, `stages_between`, `divided_chains`, `stage_changes`, `key_groups`,
`rescaled_checkpoint` with `rescaled_instances` (which instance gets which state), and `inputs`; `plans` and `spark_versions`
(whether Spark may go on from it), `claim` (who owns a savepoint), and `plain_queries` (a query that Spark alone has run, taken
over or given back)."""
