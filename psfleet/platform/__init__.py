"""What psfleet needs of the operating system and of the process: files, memory, sockets, interrupts."""
