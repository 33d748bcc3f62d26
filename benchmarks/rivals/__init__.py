"""One device's part in each of the methods that ``alternatives.py`` compares: ``python -m rivals METHOD ...``."""
