"""A task's snapshot: pinned, stored, and restored."""
