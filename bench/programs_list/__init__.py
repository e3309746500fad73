"""What bench/programs.py runs: the table of programs, the tiny data that they train on, and what records them."""
