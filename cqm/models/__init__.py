"""What is learned: effect models and the one training loop behind them."""
