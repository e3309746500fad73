"""`verify`: is a run on N ranks the same as in one process, and if not, why?"""

from lockstep.study.verify.diagnose import verify

__all__ = ["verify"]
