"""The atlas: scores of every head of a model over many documents, in shards that any number of processes compute."""
