"""Draw, never import torch: data in, something to look at out."""
