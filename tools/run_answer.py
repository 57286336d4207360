#!/usr/bin/env python3
"""Runs one answer of a model within limits. A helper of eval_code.py: `python3 -I run_answer.py SECONDS MEMORY_BYTES`.

On stdin: a line with a secret, then the program. When the program ran to its end, the secret is the last line on stdout.
Its limits are the kernel's and cannot be taken back: time, memory, size of files, and a filter of system calls that lets it
start no process, open no socket, change no file, and neither signal nor slow down another process. Linux on x86-64 and arm64, Python's own library only.
"""
import ctypes
import os
import platform
import resource
import struct
import sys

# Refused calls by number: x86-64, arm64 (-1: it has no such call).
REFUSED = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "bpf": (321, 280), "userfaultfd": (323, 282),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "creat": (85, -1), "openat2": (437, 437), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "rmdir": (84, -1), "mkdir": (83, -1), "mkdirat": (258, 34), "link": (86, -1), "linkat": (265, 37),
    "symlink": (88, -1), "symlinkat": (266, 36), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "truncate": (76, 45), "mknod": (133, -1), "mknodat": (259, 33),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "perf_event_open": (298, 241), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "setrlimit": (160, 164), "prlimit64": (302, 261), "reboot": (169, 142), "keyctl": (250, 219), "add_key": (248, 217),
    "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "fchmodat2": (452, 452),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "mq_open": (240, 180), "mq_unlink": (241, 181), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
}
# Machine: (its number for the filter, column, open or -1, openat, clone, clone3, tgkill).
MACHINES = {"x86_64": (0xC000003E, 0, 2, 257, 56, 435, 234), "aarch64": (0xC00000B7, 1, -1, 56, 220, 435, 131)}

EPERM, ENOSYS = 1, 38
ALLOW, KILL = 0x7FFF0000, 0x80000000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x10000
LOAD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in what the filter looks at
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2


def refuse(error):
    return 0x00050000 | error


def build_filter(machine):
    """The program of the filter: a list of (code, jump if true, jump if false, value)."""
    arch, column, open_, openat, clone, clone3, tgkill = MACHINES[machine]
    program = [(LOAD, 0, 0, ARCH), (JEQ, 1, 0, arch), (RET, 0, 0, KILL), (LOAD, 0, 0, NUMBER),
               (JGE, 0, 1, 0x40000000), (RET, 0, 0, KILL)]  # the other calls of x86-64
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            program += [(JEQ, 0, 1, numbers[column]), (RET, 0, 0, refuse(EPERM))]
    program += [(JEQ, 0, 1, clone3), (RET, 0, 0, refuse(ENOSYS))]  # its flags cannot be seen; clone is tried then

    def unless(number, argument, test, value, if_true, if_false):
        """A call that an argument decides about."""
        return [(JEQ, 0, 4, number), (LOAD, 0, 0, ARGUMENTS + 8 * argument), (test, 0, 1, value), (RET, 0, 0, if_true), (RET, 0, 0, if_false)]
    program += unless(clone, 0, JSET, CLONE_THREAD, ALLOW, refuse(EPERM))
    program += unless(openat, 2, JSET, WRITES, refuse(EPERM), ALLOW)
    program += unless(tgkill, 0, JEQ, os.getpid(), ALLOW, refuse(EPERM))
    if open_ >= 0:
        program += unless(open_, 1, JSET, WRITES, refuse(EPERM), ALLOW)
    return program + [(RET, 0, 0, ALLOW)]


def limit(seconds, memory):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    program = build_filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("n", ctypes.c_ushort), ("lines", ctypes.c_void_p)]
    pointer = Program(len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_PDEATHSIG, 9, 0, 0, 0), (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
                 (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(pointer), 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the limits")


def main():
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    secret = sys.stdin.readline().strip()
    program = sys.stdin.read()
    limit(seconds, memory)
    exec(compile(program, "answer.py", "exec"), {"__name__": "answer"})
    sys.stdout.write("\n" + secret + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
