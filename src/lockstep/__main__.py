"""``python -m lockstep`` is the command ``lockstep``."""

import sys

from lockstep.cli import main

sys.exit(main())
