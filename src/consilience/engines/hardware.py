"""What this process may use of the machine: cores, memory, disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and a container's share where one is set."""
    try:
        cores = len(os.sched_getaffinity(0))            # type: ignore[attr-defined, unused-ignore]
    except AttributeError:
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return max(1, cores)


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping, or None where the system does not say."""
    free = _system_memory()
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cache = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        room = limit - used + int(cache.get("inactive_file", 0))
        free = room if free is None else min(free, room)
    return free


def _system_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    if sys.platform == "win32":
        return _windows_memory()
    with contextlib.suppress(OSError, ValueError, AttributeError):      # macOS counts what is inactive as used: half is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _windows_memory() -> int | None:
    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong),
                    *((name, ctypes.c_ulonglong) for name in ("total", "free", "page_total", "page_free", "virtual_total",
                                                              "virtual_free", "extended"))]
    status = Status(ctypes.sizeof(Status))
    done = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))      # type: ignore[attr-defined, unused-ignore]
    return int(status.free) if done else None


def free_disk(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
