"""What an ordinary container does not allow a program: to look into others, or to take their descriptors."""

import ctypes
import platform
from ctypes import byref, c_int, c_long, c_ubyte, c_uint, c_ulong, c_ushort

NOT_PERMITTED = 1
PIDFD_OPEN, PIDFD_GETFD = 434, 438
# ptrace, process_vm_readv, process_vm_writev, kcmp.
LOOKING = {"x86_64": (101, 310, 311, 312), "aarch64": (117, 270, 271, 272)}[platform.machine()]

libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    _fields_ = [("code", c_ushort), ("jt", c_ubyte), ("jf", c_ubyte), ("k", c_uint)]


class Program(ctypes.Structure):
    _fields_ = [("length", c_ushort), ("filter", ctypes.POINTER(Instruction))]


def contain():
    """Those calls are refused from here on, in this thread and all that it starts."""
    refused = (*LOOKING, PIDFD_GETFD)
    steps = [Instruction(0x20, 0, 0, 0)]  # the call's number
    for place, number in enumerate(refused):
        steps.append(Instruction(0x15, len(refused) - place, 0, number))
    steps.append(Instruction(0x06, 0, 0, 0x7FFF0000))  # allowed
    steps.append(Instruction(0x06, 0, 0, 0x00050000 | NOT_PERMITTED))
    filter_ = (Instruction * len(steps))(*steps)
    program = Program(len(steps), filter_)
    set_no_new_privileges, set_filter, by_program = 38, 22, 2
    assert libc.prctl(c_int(set_no_new_privileges), c_ulong(1), c_ulong(0), c_ulong(0), c_ulong(0)) == 0
    assert libc.prctl(c_int(set_filter), c_ulong(by_program), byref(program), c_ulong(0), c_ulong(0)) == 0


def take_descriptor_of(pid):
    """The error of taking a process's first descriptor; 0 if that is allowed."""
    pidfd = libc.syscall(c_long(PIDFD_OPEN), c_int(pid), c_uint(0))
    assert pidfd >= 0, ctypes.get_errno()
    taken = libc.syscall(c_long(PIDFD_GETFD), c_int(pidfd), c_int(0), c_uint(0))
    return 0 if taken >= 0 else ctypes.get_errno()


class Handle(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 64)]


def handle_of(cuda, pointer):
    handle = Handle()
    code = cuda.cuIpcGetMemHandle(byref(handle), ctypes.c_uint64(pointer))
    assert code == 0, code
    return list(handle.bytes)


def open_handle(cuda, values):
    handle = Handle((c_ubyte * 64)(*values))
    pointer = ctypes.c_uint64()
    code = cuda.cuIpcOpenMemHandle_v2(byref(pointer), handle, c_uint(1))
    assert code == 0, code
    return pointer.value


__all__ = ["contain", "handle_of", "open_handle", "take_descriptor_of"]
