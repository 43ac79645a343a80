"""A worker of pytest-xdist, in a process that has its imports: conftest.py gives it to execnet."""

import sys

if __name__ == "__main__":  # not in the children that multiprocessing spawns
    exec(sys.argv[-1])  # what execnet would start Python with: -u -c CODE
