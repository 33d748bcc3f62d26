"""How the central node and the workers reach each other: frames, the worker daemon and its clients."""
