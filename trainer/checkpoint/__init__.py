"""Checkpoints, run folders, safetensors and Hugging Face weights."""
