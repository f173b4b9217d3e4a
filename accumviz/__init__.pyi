"""The public names and where they are: type checkers read them here, and `__init__.py` finds them here."""

from accumviz.book.distribute import distribute as distribute
from accumviz.book.explore import explore as explore
from accumviz.book.lab import lab as lab
from accumviz.book.predict import predict as predict
from accumviz.checks.check import check as check
from accumviz.checks.compare import compare as compare
from accumviz.expectation import expect as expect
from accumviz.graph.graph import Graph as Graph
from accumviz.graph.trace import trace as trace
from accumviz.ledger.ledger import Ledger as Ledger
from accumviz.ledger.ledger import load as load
from accumviz.recorder.recording import record as record
from accumviz.views.player import play as play
from accumviz.views.timeline import timeline as timeline

__all__: list[str]
__version__: str
