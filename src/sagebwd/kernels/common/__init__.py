"""What kernels read: codes, scales, means and copies, each with the kernel that writes it and its launcher."""
