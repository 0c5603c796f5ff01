"""`python -m engines`."""

import sys

from engines.cli import main

if __name__ == "__main__":
    sys.exit(main())
