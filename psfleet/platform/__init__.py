"""Access to the operating system and the process: files, memory, sockets, interrupts."""
