"""The entry point of `python -m padfree` and `torchrun -m padfree`."""

import sys

from padfree.cli.main import main

sys.exit(main())
