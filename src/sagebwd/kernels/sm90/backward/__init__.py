"""The backward, in Gluon."""
