# SPDX-License-Identifier: Apache-2.0
"""Compiles LLVM assembly to machine code of this CPU, by the LLVM that Numba ships."""

import ctypes
from functools import cache

import llvmlite.binding as llvm

Launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint64] * 3)


@cache
def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        jit=True,
    )


def describe() -> str:
    """What machine code depends on beside the kernel: LLVM's version, and the CPU."""
    version = ".".join(map(str, llvm.llvm_version_info))
    features = llvm.get_host_cpu_features().flatten()
    return f"{version} {llvm.get_host_cpu_name()} {features}"


def compile_object(assembly: str) -> bytes:
    """An object file of an optimised module."""
    machine = _machine()
    module = llvm.parse_assembly(assembly)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


@cache
def _linker() -> llvm.LLJIT:
    return llvm.create_lljit_compiler(_machine())


_loaded: list[llvm.ResourceTracker] = []  # keep the loaded code alive


def load(code: bytes) -> Launch:
    """Loads the function `launch` of an object file, for the life of the process."""
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    library.export_symbol("launch")
    _loaded.append(library.link(_linker(), f"kernel{len(_loaded)}"))
    return Launch(_loaded[-1]["launch"])
