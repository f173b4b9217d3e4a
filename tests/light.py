"""Processes that train a little: most of what they take is an import that they have no use for."""

from __future__ import annotations

# An optimizer imports torch's compiler, which takes a second, to tell it that it need not compile here: nobody asked it
# to. Scripts that are about how a process begins, ends, forks or writes begin with this; the suite's own process has
# the compiler, and so have the scripts that show a run as it is without us.
LIGHT = """
import sys as _sys, types as _types
import torch
_none = _types.ModuleType("torch._dynamo")
_none.graph_break, _none.disable = lambda *_, **__: None, lambda function=None, *_, **__: function
_none.trace_rules = _types.SimpleNamespace(add=lambda _: None)
torch._dynamo = _sys.modules["torch._dynamo"] = _none
"""
