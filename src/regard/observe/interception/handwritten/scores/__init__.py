"""The attention call that a formula of scores amounts to, and its comparison with the weights of the model."""
