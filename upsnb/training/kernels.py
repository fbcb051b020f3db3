"""Kernels that torch generates for a CPU: compiled a file for each graph, not one for each kernel."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch

import torch

from upsnb import hardware

ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
LEAST = 4  # kernels that are worth a further file, which a further core compiles
_unfinished: list[Callable[[], None]] | None = None  # of a rehearsal: each waits for the kernels of a graph
waited_s = 0.0  # at the ends of rehearsals


@functools.cache
def prepare() -> None:
    """Make torch compile the kernels of this process fast, from now on."""
    config = importlib.import_module("torch._inductor.config")
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # torch goes by the cores that a container sees
        config.compile_threads = min(config.compile_threads, hardware.num_cores())
    if hasattr(config.cpp, "use_decompose_tanh"):  # by exp, to within 2e-7: it is in each GELU, twice
        config.cpp.use_decompose_tanh = True
    know_vector_units()
    read_strides_off()
    compile_together()
    Thread(target=precompile_header, daemon=True).start()


def know_vector_units() -> None:
    """Tell torch that the vector units of this CPU can be compiled for, where the C++ compiler takes their flags.

    Else torch compiles and loads a program for each kind before its first kernel, one after the other and again in
    every new cache folder: 20 of the 96 s of processor time that params/darcy_5min.yaml compiled for.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return
    units = importlib.import_module("torch._inductor.cpu_vec_isa")
    present = units.x86_isa_checker()
    kinds = [kind for kind in units.supported_vec_isa_list if set(str(kind).split()) <= set(present)]
    flags = set(" ".join(kind.build_arch_flags() for kind in kinds).split())
    if "avx512" in present:
        flags.add("-mavx512bf16")  # which torch asks for apart from the kinds
    try:
        command = [units.config.cpp.cxx[-1], *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return  # torch will find out, and say what is wrong
    build = units.VecISA.check_build

    def takes(kind, code: str) -> bool:
        return set(kind.build_arch_flags().split()) <= flags or build(kind, code)

    with units.config.patch({"cpp.vec_isa_ok": True}), patch.object(units.VecISA, "check_build", takes):
        units.valid_vec_isa_list()  # which torch keeps


def read_strides_off() -> None:
    """Let torch read a stride off its index, where that is a sum of multiples: sympy's `simplify` takes 4 of 20 s."""
    sizes = importlib.import_module("torch._inductor.sizevars")
    if not (hasattr(sizes, "simplify_index_in_vec_range") and hasattr(sizes, "stride_at")):
        return
    simplified, stride = sizes.simplify_index_in_vec_range, sizes.stride_at

    @functools.wraps(simplified)
    def simplify_index_in_vec_range(index, var, vec_length: int):
        return index if is_sum_of_multiples(index) else simplified(index, var, vec_length)

    @functools.wraps(stride)
    def stride_at(index, var):
        return index.coeff(var) if is_sum_of_multiples(index) else stride(index, var)

    sizes.simplify_index_in_vec_range, sizes.stride_at = simplify_index_in_vec_range, stride_at


def is_sum_of_multiples(index) -> bool:
    """Whether a sympy expression is like 64*x0 + x1 + 3."""
    if not hasattr(index, "as_coeff_Mul"):  # a comparison
        return False
    factors = (term.as_coeff_Mul()[1] for term in (index.args if index.is_Add else (index,)))
    return all(factor.is_Symbol or factor == 1 for factor in factors)


def precompile_header() -> None:
    """Let torch compile the header of all kernels, while the first graph is traced: 8 s, once for a machine."""
    with contextlib.suppress(Exception):  # torch will do so with the first kernel
        bindings = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache
        bindings.load_pybinding_async([], 'extern "C" void kernel() {}', submit_fn=lambda work: None)


@dataclass
class Kernel:
    """One that waits to be compiled with the others of its graph."""

    argtypes: list[str]  # C++ types
    source: str
    compiled: object = None  # what Python calls


def compile_together() -> None:
    """Let torch compile the kernels of a graph together, where this version of torch can be told to.

    Of the 1.3 s that a kernel takes, 0.9 s are a compiler that has done nothing yet. A graph's generated code asks for
    its kernels one by one and then waits for all of them, in a rehearsal only at its end: they are gathered until then.
    What does not fit into a file with others, or fails there, is compiled alone, as torch does it.
    """
    compiler = importlib.import_module("torch._inductor.async_compile")
    bindings = getattr(importlib.import_module("torch._inductor.codecache"), "CppPythonBindingsCodeCache", None)
    graph = compiler.AsyncCompile
    if not (hasattr(graph, "cpp_pybinding") and hasattr(bindings, "load_pybinding_async")):
        return
    alone, wait = graph.cpp_pybinding, graph.wait

    @functools.wraps(alone)
    def cpp_pybinding(self, argtypes: list[str], source: str) -> Kernel:
        kernel = Kernel(argtypes, source)
        vars(self).setdefault("kernels", []).append(kernel)
        return kernel

    @functools.wraps(wait)
    def wait_for_all(self, scope: dict) -> None:
        vars(self).pop("kernels", None)
        gathered = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        kernels, threads = (
            [kernel for kernel in gathered.values() if fits(kernel.source)],
            compiler.get_compile_threads(),
        )
        later = _unfinished is not None and threads > 1 and len(kernels) == len(gathered)
        files = min(max(1, min(threads - later, len(kernels) // LEAST)), len(kernels))  # later: one core traces on
        submit = self.submit if threads > 1 else None  # one core works at once, under a lock that it holds already
        begun = []
        with contextlib.suppress(Exception):  # torch's inside is no promise, and there is a way without
            begun = [begin(kernels[number::files], bindings, submit) for number in range(files)]

        def finish() -> None:
            with contextlib.suppress(Exception):
                for give in begun:
                    give()
            for name, kernel in gathered.items():
                scope[name] = kernel.compiled or alone(self, kernel.argtypes, kernel.source)
            wait(self, scope)

        if later and len(begun) == files:
            scope.update(dict.fromkeys(gathered, do_nothing))
            _unfinished.append(finish)
        else:
            finish()

    graph.cpp_pybinding, graph.wait = cpp_pybinding, wait_for_all


def do_nothing(*_) -> None:
    """Stands for a kernel that is still being compiled."""


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Within it graphs are traced one after the other while the kernels of those before are still being compiled.

    Until then these do nothing, so what is computed in here has shapes and no meaning: throw it away, and random states
    and buffers with it. All are there when it ends; where one is not, nothing stays compiled. params/cpu_optimized.yaml
    reaches its first step in 24 s instead of 37 on two cores, 3 of them because no garbage is collected (docs/LOG.md).
    """
    global _unfinished, waited_s
    _unfinished, collects = [], gc.isenabled()
    gc.disable()  # tracing makes objects by the million, and each collection walks all that torch has imported
    try:
        yield
    finally:
        begun, unfinished, _unfinished = time.perf_counter(), _unfinished, None
        try:
            for finish in unfinished:
                finish()
        except BaseException:
            torch._dynamo.reset()
            importlib.import_module("torch._inductor.utils").clear_caches()
            raise
        finally:
            waited_s += time.perf_counter() - begun
            if collects:
                gc.enable()


def fits(source: str) -> bool:
    """Whether a kernel can be in a namespace: one function for C, which is `kernel`, and no macros."""
    directives = set(re.findall(r"^\s*#\s*(\w+)", source, re.MULTILINE))
    return directives <= {"include", "pragma"} and len(ENTRY.findall(source)) == source.count('extern "C"') == 1


def begin(kernels: list[Kernel], bindings: type, submit: Callable | None) -> Callable[[], None]:
    """Begin to compile kernels as one file; what is returned waits for it, and gives each what Python calls.

    Each is in a namespace of its own, together with the Python module that torch writes around it; the library has as
    many modules. Code, flags and the place on disk, by their content, are torch's.
    """
    head, bodies, modules = {}, [], []
    for number, kernel in enumerate(kernels):
        written: list[str] = []
        keep = staticmethod(lambda code, *_, kept=written, **__: kept.append(code))
        module = type("Module", (bindings,), {"entry_function": f"kernel_{number}", "load_async": keep})
        module.load_pybinding_async(kernel.argtypes, ENTRY.sub("void kernel(", kernel.source))
        lines = written[0].splitlines()
        top = [line.strip() for line in lines if line.lstrip().startswith(("#include", "#define"))]
        head |= dict.fromkeys(top)
        bodies.append("\n".join(line for line in lines if line.strip() not in head))
        modules.append(module)

    def load(path: str, key: str) -> SimpleNamespace:
        found = [getattr(module._load_library_inner(path, key), module.entry_function) for module in modules]
        return SimpleNamespace(kernels=found)

    file = type("File", (bindings,), {"cache": {}, "_load_library_inner": staticmethod(load)})
    spaces = [f"namespace graph_kernel_{number} {{\n{body}\n}}" for number, body in enumerate(bodies)]
    finish = file.load_async("\n".join((*head, *spaces)), submit_fn=submit)

    def give() -> None:
        for kernel, function in zip(kernels, finish().kernels, strict=True):
            kernel.compiled = function

    return give
