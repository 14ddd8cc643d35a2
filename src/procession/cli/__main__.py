"""`python -m procession.cli`: the same as the command `procession`."""

import sys

from procession.cli import main

sys.exit(main())
