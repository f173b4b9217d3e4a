"""Run a notebook's cells with the kernel called `bare`, on through errors, and write it back with its outputs.

A process of its own, so that the tests' process holds no sockets and no event loop.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

if __name__ == "__main__":
    path, work = Path(sys.argv[1]), sys.argv[2]
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": work}}
    NotebookClient(notebook, kernel_name="bare", timeout=600, allow_errors=True, resources=where).execute()
    nbformat.write(notebook, path)
