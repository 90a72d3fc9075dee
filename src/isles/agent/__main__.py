"""`python -m isles.agent FOLDER`: the agent process of one cluster."""

import sys

from isles.agent.process import main

sys.exit(main(sys.argv[1:]))
