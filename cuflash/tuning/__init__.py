"""Sweeps of block sizes: which tiles there are, what they measure, and where the winners are kept."""
