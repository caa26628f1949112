#!/usr/bin/env python3
"""Ends with one line if this Python is too old for megaflow. Any Python must be able to read this file."""

import sys

OLDEST = (3, 10)
MESSAGE = "[setup] {} is Python {}.{}, megaflow needs >= 3.10: install one, then `make demo PYTHON=python3.12`\n"

if sys.version_info < OLDEST:
    sys.stderr.write(MESSAGE.format(sys.executable, sys.version_info[0], sys.version_info[1]))
    sys.exit(1)
