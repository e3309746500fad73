"""What ``lockstep report`` makes of a recorded run: figures, advice, a page and a trace."""
