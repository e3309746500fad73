"""Where facts come from: each file reads one part of this machine, and says what it could not read."""
