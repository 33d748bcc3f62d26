"""How long devices take for runs of layers: measuring, and predicting from few measurements."""
