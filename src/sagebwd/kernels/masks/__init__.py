"""What kernels read of a mask: its map of blocks, block lists and bits, made by kernels or by torch."""
