"""Machine code of CUDA kernels, assembled from PTX by NVIDIA's nvJitLink without a device or a driver."""

import re
from dataclasses import dataclass

from cuda.bindings import nvjitlink

_VERBOSE = ("-arch=sm_90", "-verbose")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel, and what a thread or a block of it uses.

    Attributes:
        image: The code, an ELF file.
        registers: 32-bit registers of a thread.
        shared_bytes: Shared memory of a block that the code itself asks for.
        stack_bytes: Local memory of a thread, spilled registers among it.
        spill_bytes: Bytes that a thread stores and loads since it has too few registers.
    """

    image: bytes
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def assemble_cubin(ptx: str) -> Cubin:
    """The cubin of one kernel for compute capability 9.0.

    Raises:
        cuda.bindings.nvjitlink.nvJitLinkError: The assembler refuses the text.
    """
    text = ptx.encode()
    linker = nvjitlink.create(len(_VERBOSE), list(_VERBOSE))
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(linker)
        image = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, image)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    report = log.decode()
    stack, *spills = _numbers(_STACK, report)
    (registers,), (shared,) = _numbers(_REGISTERS, report), _numbers(_SHARED, report)
    return Cubin(bytes(image), registers, shared, stack, sum(spills))


def _numbers(pattern: re.Pattern[str], report: str) -> list[int]:
    match = pattern.search(report)
    if match is None:
        raise ValueError(f"nvJitLink's report lacks {pattern.pattern!r}: {report!r}")
    return [int(number) for number in match.groups()]
