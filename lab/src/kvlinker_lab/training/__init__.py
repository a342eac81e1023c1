"""How the reader in ``kvlinker/models/reader`` was made: data, tokenizer, training, evaluation."""
