"""Who hears of every step: each is called with the training and the report."""
