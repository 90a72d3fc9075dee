"""`python -m isles.worker FOLDER`: one worker process of a cluster."""

import sys

from isles.worker.process import main

sys.exit(main(sys.argv[1:]))
