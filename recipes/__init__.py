"""What this project trained itself, each model by one command: python -m recipes.pocket."""
