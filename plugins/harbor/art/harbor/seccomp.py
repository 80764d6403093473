"""The system calls that a box refuses: those that make namespaces and mounts, trace the kernel, or leave by other sockets.

A box has no capabilities, so the kernel refuses most of them anyway. Without this list a program could make a user namespace of its
own, in which it has capabilities, and mount file systems that are outside of the box's limits.
"""

import errno
import platform
import struct

ALLOW, ERROR = 0x7FFF0000, 0x00050000
LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06
"""BPF: load a word, jump if equal, jump if a bit is set, return."""
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
"""Offsets in `seccomp_data`. Linux's header linux/seccomp.h. The lower half of the first argument (little endian)."""
NEW_USER = 0x10000000
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6 and netlink sockets."""
SAME_NUMBERS = {
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
}  # fmt: skip
CALLS = {
    "x86_64": (0xC000003E, 56, 41, {
        **SAME_NUMBERS, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249, "syslog": 103, "quotactl": 179,
        "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176, "open_by_handle_at": 304, "swapon": 167,
    }),
    "aarch64": (0xC00000B7, 220, 198, {
        **SAME_NUMBERS, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218, "syslog": 116, "quotactl": 60,
        "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106, "open_by_handle_at": 265, "swapon": 224,
    }),
}  # fmt: skip
"""By machine: its number in `seccomp_data`, the numbers of `clone` and `socket`, and of the refused calls. Linux's headers unistd_64.h."""
CLONE3 = 435
X32 = 0x40000000
"""A bit of the numbers of x86-64's second set of calls."""


def make_filter() -> bytes:
    """The program for `bwrap --seccomp`. A refused call has the error EPERM; `clone3` has ENOSYS, after which libraries use `clone`.

    Raises:
        OSError: the machine is neither x86-64 nor ARM64.
    """
    if platform.machine() not in CALLS:
        raise OSError(errno.ENOTSUP, f"the sandbox has no list of system calls for {platform.machine()}")
    architecture, clone, socket_call, refused = CALLS[platform.machine()]
    refusal = _instruction(RETURN, ERROR | errno.EPERM)
    allowance = _instruction(RETURN, ALLOW)
    number = _instruction(LOAD, NUMBER)
    argument = _instruction(LOAD, ARGUMENT)
    program = [_instruction(LOAD, ARCHITECTURE), _instruction(EQUAL, architecture, 1, 0), refusal, number]
    program += [_instruction(SET, X32, 0, 1), refusal]
    program += [_instruction(EQUAL, CLONE3, 0, 1), _instruction(RETURN, ERROR | errno.ENOSYS)]
    for call in refused.values():
        program += [_instruction(EQUAL, call, 0, 1), refusal]
    program += [_instruction(EQUAL, clone, 0, 4), argument, _instruction(SET, NEW_USER, 0, 1), refusal, allowance]
    program += [_instruction(EQUAL, socket_call, 1, 0), allowance, argument]
    for family in FAMILIES:
        program += [_instruction(EQUAL, family, 0, 1), allowance]
    return b"".join([*program, refusal])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
