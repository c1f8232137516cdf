"""The system calls that a confined process keeps, and their numbers on the machines that we know.

What is left computes, takes memory, and reads and writes what is open already. Nothing here opens a
file or a socket, starts a process or a thread, or reaches another process.
"""

from dataclasses import dataclass

# In the order in which they are looked for: the frequent ones first.
_X86_64 = {
    "read": 0,
    "write": 1,
    "futex": 202,
    "munmap": 11,
    "brk": 12,
    "madvise": 28,
    "mremap": 25,
    "recvmsg": 47,
    "close": 3,
    "fstat": 5,
    "lseek": 8,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "sigaltstack": 131,
    "sched_yield": 24,
    "getpid": 39,
    "gettid": 186,
    "getrandom": 318,
    "clock_gettime": 228,
    "clock_getres": 229,
    "gettimeofday": 96,
    "clock_nanosleep": 230,
    "nanosleep": 35,
    "restart_syscall": 219,
    "poll": 7,
    "getrusage": 98,
    "sched_getaffinity": 204,
    "sysinfo": 99,
    "membarrier": 324,
    "rseq": 334,
    "set_robust_list": 273,
    "exit": 60,
    "exit_group": 231,
}
_AARCH64 = {
    "read": 63,
    "write": 64,
    "futex": 98,
    "munmap": 215,
    "brk": 214,
    "madvise": 233,
    "mremap": 216,
    "recvmsg": 212,
    "close": 57,
    "fstat": 80,
    "lseek": 62,
    "rt_sigaction": 134,
    "rt_sigprocmask": 135,
    "rt_sigreturn": 139,
    "sigaltstack": 132,
    "sched_yield": 124,
    "getpid": 172,
    "gettid": 178,
    "getrandom": 278,
    "clock_gettime": 113,
    "clock_getres": 114,
    "gettimeofday": 169,
    "clock_nanosleep": 115,
    "nanosleep": 101,
    "restart_syscall": 128,
    "ppoll": 73,
    "getrusage": 165,
    "sched_getaffinity": 123,
    "sysinfo": 179,
    "membarrier": 283,
    "rseq": 293,
    "set_robust_list": 99,
    "exit": 93,
    "exit_group": 94,
}


@dataclass(frozen=True)
class Machine:
    """What a filter must know of a kind of processor: `audit` is the kernel's name of it.

    `allowed` are numbers of calls that are always let through; `memory` those that map memory or
    change its protection, which are let through unless it is to be executed; `tgkill` is let through
    for the process itself, which is how it aborts.
    """

    audit: int
    allowed: tuple[int, ...]
    memory: tuple[int, ...]
    tgkill: int
    seccomp: int


MACHINES = {
    "x86_64": Machine(0xC000003E, tuple(_X86_64.values()), (9, 10), 234, 317),
    "aarch64": Machine(0xC00000B7, tuple(_AARCH64.values()), (222, 226), 131, 277),
}
