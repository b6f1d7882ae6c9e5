"""Records between tasks: logs of segments and marks, and how outputs and inputs are connected."""
