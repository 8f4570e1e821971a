"""``python -m kvlearn``: the command line where the ``kvlearn`` script is not on the path."""

import sys

from kvlearn.cli import main

sys.exit(main())
