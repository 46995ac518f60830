"""From a problem to a launch on a GPU: choose, spec, render, compile, cache, launch."""
