"""Observe torch, never steer it: the only place that imports torch."""
