"""MaxGain and its watch in other training loops: one callback for each framework."""
