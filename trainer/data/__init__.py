"""Training data: tokenized corpora, synthetic tasks, tokenizers, and the dataset that mixes them."""
