"""Makes the text of `baton doctor --report`: versions, devices and findings, for an issue that anyone may read.

It holds no prompt, key, host name, user name or path of the user. `Redaction` removes the last three from messages of
drivers and libraries, which may quote them.
"""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from baton_serve.services.doctor.cards import installed_version
from baton_serve.services.doctor.findings import DoctorReport

STATUS_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "problem": "PROBLEM"}
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
"""Instructions that the CPU kernels or torch use."""
SYSTEM_PACKAGES = (
    "libze1",
    "libze-intel-gpu1",
    "intel-level-zero-gpu",
    "intel-opencl-icd",
    "libigc2",
    "linux-firmware",
)
PYTHON_PACKAGES = (
    "torch triton triton-xpu pytorch-triton-xpu intel-extension-for-pytorch oneccl oneccl_bind_pt intel-sycl-rt"
    " nvidia-nccl-cu12 nvidia-nccl-cu13 transformers tokenizers safetensors numpy pyzmq msgspec"
).split()
VARIABLES = (
    "ZE_AFFINITY_MASK ZE_FLAT_DEVICE_HIERARCHY ONEAPI_DEVICE_SELECTOR CCL_TOPO_P2P_ACCESS CCL_ZE_IPC_EXCHANGE"
    " CCL_ATL_TRANSPORT CUDA_VISIBLE_DEVICES NCCL_P2P_DISABLE TRITON_INTERPRET OMP_NUM_THREADS"
).split()
"""Variables that change how devices, transports or kernels work. No other variable is in a report: some hold keys."""
_PUBLIC_FOLDERS = ("dev", "proc", "sys", "usr", "lib", "lib64", "etc", "bin")
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:,;'\"()]+/)*[^\s/:,;'\"()]+")


@dataclass(frozen=True, slots=True)
class Redaction:
    """Removes the names of this host and of the user, and private paths, from a text for an issue."""

    host: str
    user: str
    """Both may be empty, if they are not known."""

    def apply(self, text: str) -> str:
        """Return `text` with placeholders for the host, the user and private paths. A file name with a suffix stays
        readable.
        """
        # Paths first: their folders often contain the user's name, and then disappear as a whole.
        text = _PATH.sub(self._path, text)
        for name, mark in ((self.host, "HOST"), (self.host.split(".")[0], "HOST"), (self.user, "USER")):
            # `root` identifies nobody, and messages contain it as a word.
            if name and name != "root":
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", mark, text)
        return text

    def _path(self, match: re.Match[str]) -> str:
        folder, _, name = match[0].rpartition("/")
        # These folders are alike on all machines of a distribution.
        if match[0].split("/")[1] in _PUBLIC_FOLDERS:
            return match[0]
        # Which library or module failed matters; the last folder of a path may be a person's or a model's name.
        return f"PATH/{name}" if "." in name and folder else "PATH"


def as_issue_text(report: DoctorReport, root: Path, environ: Mapping[str, str], redaction: Redaction) -> str:
    """Return the report as text for an issue that anyone may read: facts about the machine, then a line for each
    finding, without remedies. `redaction` removes private names from it.
    """
    # Without remedies: the reader of an issue knows them, and the text stays short enough to paste.
    problems = sum(finding.status == "problem" for finding in report.findings)
    lines = [
        f"baton doctor --report (Baton {report.version})",
        *(f"{name:<10}{value}" for name, value in _facts(root, environ) if value),
        *(f"{STATUS_MARKS[finding.status]}  {finding.check}: {finding.message}" for finding in report.findings),
        f"{problems} problem(s)" if problems else "no problems",
    ]
    return "\n".join(redaction.apply(line) for line in lines) + "\n"


def _facts(root: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "system", _system(root)
    yield "cpu", _cpu(root)
    # Render nodes of all vendors, also integrated GPUs: a second GPU may be the cause of a problem.
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        yield "gpu", _gpu(node)
    yield "drivers", ", ".join(_drivers(root))
    yield "packages", _versions(PYTHON_PACKAGES)
    yield "variables", ", ".join(f"{name}={environ[name]}" for name in VARIABLES if environ.get(name))


def _system(root: Path) -> str:
    # By files and not by `platform`, whose functions also return the host name.
    release = re.search(r'^PRETTY_NAME="?(.*?)"?$', _text(root / "etc/os-release"), re.MULTILINE)
    is_container = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    parts = [
        f"Linux {_text(root / 'proc/sys/kernel/osrelease')} {platform.machine()}",
        release[1] if release else "",
        f"Python {platform.python_version()}",
        "in a container" if is_container else "",
        "WSL" if (root / "dev/dxg").exists() else "",
    ]
    return ", ".join(part for part in parts if part)


def _cpu(root: Path) -> str:
    # ARM has no "model name" and calls its flags "Features": the line then says so.
    text = _text(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    words = set((flags[1] if (flags := re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)) else "").split())
    cores = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    found = ", ".join(flag for flag in CPU_FLAGS if flag in words) or "no vector instructions that Baton uses"
    return f"{model[1] if model else 'unknown'}, {cores} logical CPUs; {found}"


def _gpu(node: Path) -> str:
    """Return a description of the GPU with the folder `node` in sysfs, by its PCI ids, such as
    `8086:e20b, driver xe`.
    """
    device = node / "device"
    ids = ":".join(_text(device / name).removeprefix("0x") for name in ("vendor", "device"))
    driver = (device / "driver").resolve().name if (device / "driver").exists() else "none"
    return f"{ids}, driver {driver}"


def _drivers(root: Path) -> Iterator[str]:
    for package in SYSTEM_PACKAGES:
        if version := installed_version(root, package):
            yield f"{package} {version}"
    # The file also names the machine on which the module was built; only the version is taken.
    if nvidia := re.search(r"\d{3}\.[\d.]+", _text(root / "proc/driver/nvidia/version")):
        yield f"nvidia {nvidia[0]}"


def _versions(packages: Sequence[str]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        # A package that is absent is left out: most of them belong to another kind of device.
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
