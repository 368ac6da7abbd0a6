"""The atlases of SmolLM2-135M-Instruct and of the pocket model, each over about a million tokens."""
