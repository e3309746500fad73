"""`verify`: is a run on N ranks the same as in one process, and if not, why?"""
