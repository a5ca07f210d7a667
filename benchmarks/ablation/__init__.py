"""What each step of the method is worth."""
