"""Kernels of a CPU: compiled a file for each graph, with the same results, and alone where that does not go."""

import functools
import importlib
import inspect

import pytest
import sympy
import torch

from upsnb.training import kernels

compiler = importlib.import_module("torch._inductor.async_compile")
KERNEL = '#include <a.h>\nextern "C"  void kernel(float* out)\n{\n#pragma omp parallel\n}\n'


def test_torch_is_told_of_vector_units_that_the_compiler_takes_and_of_no_others(monkeypatch):
    told, units = [], importlib.import_module("torch._inductor.cpu_vec_isa")
    monkeypatch.setattr(units, "valid_vec_isa_list", lambda: told.append(units.config.cpp.vec_isa_ok))
    for command in ("true", "false", "not-there"):
        with units.config.patch({"cpp.cxx": (None, command)}):
            kernels.know_vector_units()
    assert told == [True] and units.config.cpp.vec_isa_ok is None


@pytest.mark.parametrize("index", ["x", "y", "7", "0", "64*x + 3*y + 5", "-x", "2*x*y + 1", "x**2", "4*x + 32*(y + 1)"])
def test_strides_read_off_an_index_are_those_that_torch_computes(monkeypatch, index):
    sizes = importlib.import_module("torch._inductor.sizevars")
    if not hasattr(sizes, "simplify_index_in_vec_range"):
        pytest.skip("torch 2.11 keeps these elsewhere, and computes all strides")
    for name in ("simplify_index_in_vec_range", "stride_at"):  # as torch has them, and put back
        monkeypatch.setattr(sizes, name, inspect.unwrap(getattr(sizes, name), stop=lambda f: hasattr(f, "cache_info")))
    x, y = sympy.symbols("x y", integer=True)
    index = sympy.sympify(index, {"x": x, "y": y})
    expected = [sizes.stride_at(sizes.simplify_index_in_vec_range(index, var, 16), var) for var in (x, y)]
    kernels.read_strides_off()
    found = [sizes.stride_at(sizes.simplify_index_in_vec_range(index, var, 16), var) for var in (x, y)]
    assert found == expected and all(isinstance(one, sympy.Expr) for one in found)
    compared = sympy.Symbol("z") >= index  # what is asked of a mask that is computed from places
    assert sizes.stride_at(sizes.simplify_index_in_vec_range(compared, x, 16), sympy.Symbol("other")) == 0
    assert kernels.is_sum_of_multiples(index) == (sympy.Poly(index, x, y).total_degree() <= 1 and "(" not in str(index))


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        (KERNEL, True),
        (KERNEL.replace("kernel", "other"), False),
        (KERNEL + KERNEL, False),
        ("#define SIZE 3\n" + KERNEL, False),
        ("#if 1\n" + KERNEL + "#endif\n", False),
    ],
    ids=["one", "other name", "two functions", "macro", "condition"],
)
def test_only_a_single_function_without_macros_joins_others(source, fits):
    assert kernels.fits(source) == fits


def test_a_compiled_tanh_is_as_exact_as_float32_and_lets_nothing_through_that_is_no_number():
    kernels.prepare()
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-torch.inf, -1e30, 0.0, 1e30, torch.inf, torch.nan])))
    found, expected = torch.compile(torch.tanh, dynamic=False)(x), torch.tanh(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-7, equal_nan=True)
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    torch.testing.assert_close(torch.compile(gelu, dynamic=False)(x), gelu(x), rtol=1e-5, atol=3e-6, equal_nan=True)


class Alone:
    """What torch's generated code talks to."""

    def cpp_pybinding(self, argtypes, source):
        return "alone", source

    def wait(self, scope):
        scope["waited"] = True

    submit = None


@pytest.mark.parametrize("trouble", ["another torch", "it fails", "macros"])
def test_what_cannot_be_compiled_together_is_compiled_alone(monkeypatch, trouble):
    make = type("AsyncCompile", (Alone,), {"cpp_pybinding": Alone.cpp_pybinding, "wait": Alone.wait})
    monkeypatch.setattr(compiler, "AsyncCompile", make)
    if trouble == "another torch":
        monkeypatch.delattr(importlib.import_module("torch._inductor.codecache"), "CppPythonBindingsCodeCache")
    kernels.compile_together()
    assert (make.wait is Alone.wait) == (trouble == "another torch")
    source = "#define SIZE 3\n" + KERNEL if trouble == "macros" else KERNEL
    graph, tried = make(), []
    monkeypatch.setattr(kernels, "begin", lambda *arguments: tried.append(arguments) or 1 / 0)
    scope = {"first": graph.cpp_pybinding([], source), "other": 3}
    graph.wait(scope)
    assert scope == {"first": ("alone", source), "other": 3, "waited": True}
    assert len(tried) == (trouble == "it fails")


@pytest.fixture
def two_graphs(monkeypatch):
    """Makes a torch of two threads whose graphs are of one kernel each, and begins to compile two of them."""

    def compile_two(alone, give):
        make = type("AsyncCompile", (Alone,), {"cpp_pybinding": alone, "wait": Alone.wait, "submit": print})
        monkeypatch.setattr(compiler, "AsyncCompile", make)
        monkeypatch.setattr(compiler, "get_compile_threads", lambda: 2)
        monkeypatch.setattr(kernels, "begin", lambda chosen, *_: lambda: give(chosen))
        kernels.compile_together()
        scopes = []
        for _ in range(2):
            graph = make()
            scopes.append({"kernel": graph.cpp_pybinding([], KERNEL), "other": 3})
            graph.wait(scopes[-1])
        return scopes

    return compile_two


def test_in_a_rehearsal_kernels_do_nothing_and_after_it_they_are_there(two_graphs):
    def give(chosen):
        for kernel in chosen:
            kernel.compiled = "together"

    with kernels.rehearsal():
        scopes = two_graphs(Alone.cpp_pybinding, give)
        assert all(scope["kernel"](1, 2) is None and scope["other"] == 3 for scope in scopes)
    assert [scope["kernel"] for scope in scopes] == ["together", "together"]
    assert [scope["kernel"] for scope in two_graphs(Alone.cpp_pybinding, give)] == ["together", "together"]


def test_where_a_kernel_of_a_rehearsal_cannot_be_compiled_no_graph_is_left_that_would_call_it(two_graphs, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no C++ compiler")

    forgotten, utils = [], importlib.import_module("torch._inductor.utils")
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgotten.append("graphs"))
    monkeypatch.setattr(utils, "clear_caches", lambda: forgotten.append("code"))
    with pytest.raises(RuntimeError, match="no C.. compiler"), kernels.rehearsal():
        two_graphs(refuse, refuse)
    assert forgotten == ["graphs", "code"]


def attend(x):
    """Three kernels, between products."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return torch.nn.functional.gelu((y @ y.mT).softmax(-1) @ x)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.long), 2])  # with one, torch compiles in here
def test_kernels_of_a_graph_are_one_file_and_compute_the_same_to_the_last_bit(tmp_path, monkeypatch, cores):
    torch._inductor.utils.clear_caches()  # of what another test compiled in this process
    found, libraries, x = [], [], torch.randn(2, 40, 24)
    for own in ("cpp_pybinding", "wait"):  # put back after the test
        method = getattr(compiler.AsyncCompile, own)
        monkeypatch.setattr(compiler.AsyncCompile, own, getattr(method, "__wrapped__", method))
    for name in ("alone", "together", "again", "rehearsed"):
        place = "together" if name == "again" else name
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / place))
        if name == "together":
            kernels.compile_together()
        torch._dynamo.reset()
        if name == "rehearsed":
            torch._inductor.utils.clear_caches()
        with torch.no_grad(), torch._inductor.config.patch(compile_threads=cores):
            compiled = torch.compile(attend, dynamic=False)
            if name == "rehearsed":
                with kernels.rehearsal():
                    compiled(x)
            found.append(compiled(x))
        libraries.append(len(list(tmp_path.rglob("*.so"))))
    torch._dynamo.reset()
    assert all(torch.equal(found[0], other) for other in found[1:])
    alone, together, again, rehearsed = libraries
    assert alone > 1 and together == alone + 1 == again and rehearsed == again + 1
