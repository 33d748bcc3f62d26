"""The central node, the stages, and what they say to each other."""
