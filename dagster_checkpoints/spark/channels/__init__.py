"""Records between tasks: logs of segments and marks, and the connections of outputs and inputs."""
