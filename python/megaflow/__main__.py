"""`python -m megaflow` is `megaflow`."""

from megaflow.cli.main import main

raise SystemExit(main())
