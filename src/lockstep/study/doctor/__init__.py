"""What on this machine, and in a script, will slow or hang training, each with its fix."""
