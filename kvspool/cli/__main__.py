"""Run the command as `python -m kvspool.cli`."""

from kvspool.cli import main

raise SystemExit(main())
