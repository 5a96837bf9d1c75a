"""Many runs: choosing numbers, running, recording, and what the records show."""
