// The whole device but autocast.cpp, which takes as long to compile: what takes the time is torch's headers, read once here.
#include "runtime.cpp"

#include "operators.cpp"

#include "kernels.cpp"

#include "process_group.cpp"
