"""`compare`: one device, both engines and torch's own, side by side on one task, with a table and a verdict."""
