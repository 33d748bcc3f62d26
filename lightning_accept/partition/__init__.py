"""Which device holds which layers, and how many batches are in flight: planner, simulator, schedule."""
