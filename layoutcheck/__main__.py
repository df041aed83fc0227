"""``python -m layoutcheck``: the command line."""

import sys

from layoutcheck._cli import main

sys.exit(main())
