"""Studies of where the error of recipes comes from."""
