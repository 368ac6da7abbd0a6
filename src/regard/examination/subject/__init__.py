"""What is examined and how it is called: its inputs, its outputs, and the state that is restored after each call."""
