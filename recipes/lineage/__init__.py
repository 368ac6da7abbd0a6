"""Where attention came from: translators without it, with it and with nothing else, trained on the same sentence pairs."""
