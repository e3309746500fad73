"""What runs within the ranks of a rehearsal; imported by nobody else."""
