"""Listeners: callables that receive the training and the report after every step."""
