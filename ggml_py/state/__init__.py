"""What a sequence remembers between its steps."""
