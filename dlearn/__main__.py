"""`python -m dlearn`: the command, where no folder of commands is on PATH."""

import sys

from dlearn.cli import main

sys.exit(main())
