"""How a kernel is launched, whichever it is: the driver, alignment, programs and their launchers, the device."""
