"""Kernels of a CUDA device, and the queue of its work. Start with cuda_queue.py.

    cuda_queue.py         streams, events, and copies between host and device
    cuda_launch.py        arrays of the device, and launches of compiled kernels
    cuda.py               updates of dense arrays and rows by a rule
    cuda_text.py          generator of a rule's CUDA kernels
    cuda_index.py         index of a sparse table: find, add and remove ids
    cuda_distinct.py      number the distinct ids of several pushes
    cuda_rows.py          read, write and initialise rows
    cuda_arithmetic.py    products and rounding with the bits of the CPU

numba.cuda compiles the kernels. With NUMBA_ENABLE_CUDASIM=1 they run in numba's simulator, without a device.
Results are bit-identical to those of the CPU, except for rules that call math.pow (decision 6). An edit of
code in the last three modules changes the cache's key, so that CUDA kernels are compiled again.
"""
