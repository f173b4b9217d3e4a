"""Processes that train a little: most of what they take is an import that they have no use for."""

# An optimizer imports torch's compiler, which takes a second, to tell it that it need not compile here: nobody asked it
# to. `import torch` itself spends a third of its time on what computes shapes without numbers and on exports, and looks
# through its memory again and again meanwhile and once more at the end. Scripts that are about how a process begins,
# ends, forks or writes begin with this; the suite's own process has all that, and so have the scripts that show a run
# as it is without us.
LIGHT = """
import gc as _gc, sys as _sys, types as _types
_gc.disable()
for _name in ("torch._meta_registrations", "torch.export", "torch._native"):
    _sys.modules[_name] = _types.ModuleType(_name)
_sys.modules["torch.export"].ExportedProgram = None  # torch 2.8 takes it from there
import torch, torch._prims.rng_prims as _drawn_by_loaders
_none = _types.ModuleType("torch._dynamo")
_none.graph_break, _none.disable = lambda *_, **__: None, lambda function=None, *_, **__: function
_none.trace_rules = _types.SimpleNamespace(add=lambda _: None, clear_lru_cache=lambda: None)
_none.utils = _types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no")
torch._dynamo = _sys.modules["torch._dynamo"] = _none
_gc.freeze()
_gc.enable()
"""
