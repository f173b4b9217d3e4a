"""`python -m accumviz`."""

from accumviz.cli import main

if __name__ == "__main__":
    main()
