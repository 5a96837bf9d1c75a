"""MaxGain in other people's training loops: one callback per framework, and what the callbacks share."""
