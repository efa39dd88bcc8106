"""``python -m fusiongate.presets``: the process that runs presets for another one; tasks come on its input."""

import sys

from .worker import main

sys.exit(main())
