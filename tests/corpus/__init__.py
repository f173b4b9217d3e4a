"""Loops of a training script, each with one mistake and its right twin; and loops with nothing wrong."""
