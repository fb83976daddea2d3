"""Evaluation: of a run on its held-out data, and of a checkpoint on a suite of long-context tasks."""
