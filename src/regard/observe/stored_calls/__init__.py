"""What is stored of attention calls: queries, keys, masks and values, each once, and the maps that are built of them."""
