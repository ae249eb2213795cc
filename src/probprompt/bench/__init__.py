"""What the engine costs on this machine: speed, latency, memory, where the time goes, and how all of it grows."""
