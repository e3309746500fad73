"""What is looked at: each file has the facts of one topic, and what they mean for a run."""
