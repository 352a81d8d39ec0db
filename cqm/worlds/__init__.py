"""What can be branched: simulators behind one contract."""
