"""Checkpoints, run folders, the safetensors format and Hugging Face weights."""
