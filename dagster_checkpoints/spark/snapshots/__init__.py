"""A task's snapshot on its way to storage and back."""
