"""Graphviz's `dot` as far as accumviz calls it (`dot -Tsvg < graph`), by the Graphviz in pygraphviz."""

import sys

from pygraphviz import AGraph

if __name__ == "__main__":
    (form,) = (argument.removeprefix("-T") for argument in sys.argv[1:])
    sys.stdout.buffer.write(AGraph(string=sys.stdin.read()).draw(format=form, prog="dot"))
