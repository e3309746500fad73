"""What bench/conformance.py trains: one file for each project, written as the documentation of that project says.

Each file has

    PACKAGES  the distributions whose versions the page names
    SWITCHES  by row: what the documentation offers beside the default, each as its own line of the cell
    command   the launcher that the documentation names, with its arguments
    train     a training as `Case` describes it, on this rank; what it finds goes to `shared.record`
"""
