#!/usr/bin/env python3
"""Runs one answer of a model, or its test, within limits. A helper of eval_code.py.

    python3 -I run_answer.py answer SECONDS MEMORY_BYTES NAME          # defines the function NAME and answers calls of it
    python3 -I run_answer.py judge SECONDS MEMORY_BYTES NAME IN OUT    # runs the test, which calls that function

Two processes, so that an answer cannot touch its test: the test and the values it expects are in the judge alone. The judge's exit
status is the verdict. stdin begins with a line of JSON: the code. The answer then reads calls from its stdin and writes results to
its stdout; the judge has the other ends, the descriptors IN and OUT. A call, and a result, is a line of JSON that holds data only
(see pack()), so a result can do nothing in the judge. Files can be read, the file of problems among them.

The limits are the kernel's and cannot be taken back: time, memory, size of files, and a filter of system calls that lets a process
start no other, open no socket, change no file, and neither signal nor slow down another process. Linux on x86-64 and arm64,
Python's own library only.
"""
import builtins
import ctypes
import json
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


# How the judge ends. ENDED: the answer's process did, and its status says more. UNFIT: the test cannot be run like this.
PASSED, FAILED, MEMORY, ENDED, UNFIT = 0, 1, 3, 4, 5


class Unfit(Exception):
    """A test passes something to the function that is no data."""


class Ended(Exception):
    """The answer's process has ended."""


def pack(value):
    """Data as JSON that keeps Python's types. Raises TypeError for anything that is no data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return {"int": hex(value)}  # no limit of digits, and fast
    for kind, data in ((float, float.hex), (complex, lambda z: [z.real.hex(), z.imag.hex()]), (bytes, bytes.hex), (bytearray, bytearray.hex)):
        if isinstance(value, kind):
            return {kind.__name__: data(value)}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(f"an object of type {type(value).__name__} is no data")


KINDS = {"int": lambda text: int(text, 16), "float": float.fromhex, "complex": lambda parts: complex(*map(float.fromhex, parts)),
         "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
         "dict": lambda items: {unpack(key): unpack(item) for key, item in items},
         **{kind.__name__: lambda items, kind=kind: kind(map(unpack, items)) for kind in (list, tuple, set, frozenset)}}


def unpack(value):
    """Raises for what pack() does not write."""
    if not isinstance(value, dict):
        return value
    (kind, data), = value.items()
    return KINDS[kind](data)


def update(argument, value):
    """A function may change the lists it is given: the caller's list becomes what the callee's is."""
    if type(argument) is not type(value):
        return
    if isinstance(argument, (list, bytearray)):
        argument[:] = value
    elif isinstance(argument, (set, dict)):
        argument.clear()
        argument.update(value)


def serve_answer(code, name, calls, results):
    """Defines the function, says how that went, and answers calls until there are no more."""
    def reply(function):
        try:
            line = json.dumps(function())
        except MemoryError:
            os._exit(MEMORY)  # there may be none left to say so
        except BaseException as error:  # SystemExit, too: the answer's end is no verdict
            line = json.dumps({"raised": type(error).__name__, "text": str(error)[:1000]})
        results.write(line + "\n")
        results.flush()

    space = {"__name__": "answer"}

    def load():
        exec(compile(code, "answer.py", "exec"), space)
        return {"defined": callable(space.get(name))}

    def call(line):
        args, kwargs = unpack(json.loads(line))
        return {"value": pack(space[name](*args, **kwargs)), "args": pack(args)}
    reply(load)
    for line in calls:
        reply(lambda: call(line))
    results.close()
    os._exit(0)  # threads of the answer need not end


class Candidate:
    """The function of an answer, in another process."""

    def __init__(self, results, calls):
        self.results, self.calls = results, calls
        self.receive()

    def receive(self):
        line = self.results.readline()
        if not line.endswith("\n"):
            raise Ended
        reply = json.loads(line)
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
            try:
                error = kind(str(reply["text"]))
            except TypeError:  # UnicodeDecodeError and others want more than a text
                error = RuntimeError(str(reply["text"]))
            raise error
        return reply

    def __call__(self, *args, **kwargs):
        try:
            line = json.dumps(pack((list(args), kwargs)))
        except TypeError as error:
            raise Unfit(str(error)) from error
        try:
            self.calls.write(line + "\n")
            self.calls.flush()
        except BrokenPipeError as error:
            raise Ended from error
        reply = self.receive()
        for argument, value in zip(args, unpack(reply["args"])):
            update(argument, value)
        return unpack(reply["value"])


def judge(code, name, results, calls):
    """The verdict. The code defines `check`, and before it what the test uses of the prompt."""
    try:
        space = {"__name__": "test"}
        exec(compile(code, "test.py", "exec"), space)
        space[name] = candidate = Candidate(results, calls)
        space["check"](candidate)
    except Ended:
        return ENDED
    except Unfit as error:
        print(error, file=sys.stderr)
        return UNFIT
    except MemoryError:
        return MEMORY
    except BaseException:
        return FAILED
    return PASSED


def main():
    role, seconds, memory, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    code = json.loads(lines.readline())
    if role == "judge":
        results, calls = os.fdopen(int(sys.argv[5])), os.fdopen(int(sys.argv[6]), "w")
        limit(seconds, memory)
        os._exit(judge(code, name, results, calls))
    results = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)  # what the answer itself reads and prints
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    limit(seconds, memory)
    serve_answer(code, name, lines, results)


if __name__ == "__main__":
    main()
