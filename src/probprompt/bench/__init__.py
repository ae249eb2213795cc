"""Speed, latency, memory and operations on this machine."""
