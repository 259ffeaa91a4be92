"""What is right: the recipes' arithmetic in PyTorch, and how a kernel is held to it. Imports no kernels."""
