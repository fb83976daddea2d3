"""A training run: its config, model, data, engine, loop, checkpoints, metrics and evaluation.

Here belongs what knows of a run but not of how it was started. The model takes its attention as an argument, so nothing
in it speaks of ranks; DeepSpeed and its quirks stay inside engine.py, wandb inside tracking.py.
"""
