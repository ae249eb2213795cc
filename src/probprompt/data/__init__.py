"""From image files to a stream of tasks."""
