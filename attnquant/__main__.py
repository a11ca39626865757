"""`python -m attnquant`."""

import sys

from attnquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
