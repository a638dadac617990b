"""Decoders compiled for this CPU: see `decoder.cpp`."""
