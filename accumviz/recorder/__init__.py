"""Observe torch, never steer it: record what a program does to each `.grad`."""
