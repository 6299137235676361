"""Tells callgrind from inside of a process to begin counting, so that what comes before is merely run, not instrumented.

Importing PyMongo and the SDK is most of what a counted process executes, and ten times slower when it is instrumented.
The request is a sequence of instructions that does nothing on a processor and is recognised by valgrind (valgrind.h,
`VALGRIND_DO_CLIENT_REQUEST`); it is known here for x86-64. Elsewhere callgrind instruments from the start.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

_START_INSTRUMENTATION = (ord("C") << 24) + (ord("T") << 16) + 4
_ON_X86_64 = bytes.fromhex(
    "4889f8"  # mov rax, rdi: where the request is
    "31d2"  # xor edx, edx: the answer when this is no valgrind
    "48c1c703 48c1c70d 48c1c73d 48c1c733"  # rotate rdi by 3, 13, 61, 51: by nothing, in all
    "4887db"  # xchg rbx, rbx
    "4889d0"  # mov rax, rdx
    "c3"  # ret
)


def can_start_late() -> bool:
    return platform.machine() in {"x86_64", "AMD64"}


def start() -> None:
    if not can_start_late():
        return
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_ON_X86_64)
    request = (ctypes.c_uint64 * 6)(_START_INSTRUMENTATION)
    call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
    call(ctypes.addressof(ctypes.c_char.from_buffer(page)))(ctypes.addressof(request))
