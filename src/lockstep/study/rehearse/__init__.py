"""`lockstep rehearse`: real ranks, real reductions, and faults by rule."""
