"""`python -m regard`: the command line."""

from regard.cli import main

raise SystemExit(main())
