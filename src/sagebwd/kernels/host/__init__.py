"""How a kernel is launched, whichever it is: alignment, recording and replaying, the device."""
