"""Run the command as `python -m kvspool.cli`."""

import sys

from kvspool.cli import main

sys.exit(main())
