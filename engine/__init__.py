"""What makes it fit and fast: models, decoding, the update, memory, run folders."""
