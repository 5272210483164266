"""`python -m fasttrain` and `torchrun -m fasttrain`."""

import sys

from fasttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
