"""Runs a command under a container's seccomp profile, without the container: seccomp_run.py PROFILE [NAMES] COMMAND...
NAMES, between commas, are refused besides. Needs libseccomp's shared library; no privileges, as none can be gained afterwards."""

import ctypes
import errno
import json
import os
import sys

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
COMPARISONS = ["SCMP_CMP_NE", "SCMP_CMP_LT", "SCMP_CMP_LE", "SCMP_CMP_EQ", "SCMP_CMP_GE", "SCMP_CMP_GT", "SCMP_CMP_MASKED_EQ"]


class Argument(ctypes.Structure):
    _fields_ = [("number", ctypes.c_uint), ("comparison", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


def action_of(name, number):
    return ALLOW if name == "SCMP_ACT_ALLOW" else {"SCMP_ACT_ERRNO": ERRNO | (errno.EPERM if number is None else number)}[name]


def apply(profile, refused):
    """As container runtimes do it: what is the default anyway and what this machine has not are left out."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    default = action_of(profile["defaultAction"], profile.get("defaultErrnoRet"))
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(default)))
    assert context, "seccomp_init"
    rules = [{"names": refused, "action": "SCMP_ACT_ERRNO"}, *profile["syscalls"]]
    done = set()
    for rule in rules:
        action = action_of(rule["action"], rule.get("errnoRet"))
        arguments = [Argument(a["index"], 1 + COMPARISONS.index(a["op"]), a["value"], a.get("valueTwo", 0)) for a in rule.get("args") or []]
        array = (Argument * len(arguments))(*arguments)
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if action == default or number == -1 or name in done:
                continue
            result = library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(arguments), array)
            assert result == 0, (name, os.strerror(-result))
        if rule["names"] is refused:
            done = set(refused)
    result = library.seccomp_load(context)
    assert result == 0, os.strerror(-result)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = json.load(file)
    apply(wanted, [name for name in sys.argv[2].split(",") if name])
    os.execvp(sys.argv[3], sys.argv[3:])
