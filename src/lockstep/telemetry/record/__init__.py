"""A run as files: each rank's lines of JSON, and what they mean."""
