"""`python -m holdfast.cli`."""

import sys

from . import main

sys.exit(main())
