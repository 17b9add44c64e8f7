"""Kernels of a CUDA device, and the queue of its work. Start with cuda_queue.py.

    cuda_queue.py         streams, events, and copies between host and device
    cuda.py               updates of dense arrays and rows by a rule
    cuda_text.py          generator of a rule's CUDA kernels
    cuda_index.py         index of a sparse table: find, add and remove ids
    cuda_rows.py          read, write and initialise rows
    cuda_arithmetic.py    products and rounding with the bits of the CPU

numba.cuda compiles the kernels. With NUMBA_ENABLE_CUDASIM=1 they run in numba's simulator, without a device.
Results have the same bits as on the CPU, except those of rules that call math.pow (decision 6). The text of
the last three modules is part of the key of compiled kernels in the cache: editing them compiles CUDA kernels
again.
"""
