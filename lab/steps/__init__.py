"""Where the time and the memory of training steps go, one attention beside another."""
