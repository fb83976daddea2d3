"""Datasets: tokenized corpora, synthetic tasks, tokenizers."""
