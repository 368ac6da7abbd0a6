"""The pocket model: a small GPT-2 that writes simple stories, from its corpus to its card."""
