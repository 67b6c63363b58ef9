"""`make gpu-check`: everything that needs a GPU, in one go: builds, native tests, conformance, benchmarks, a report.

    PYTHONPATH=tools python -m gpu_check [--into tools/gpu_check/results] [--wheels build/gpu-wheels]

It needs torch with CUDA, nvcc and a GPU, downloads nothing, and ends within nine minutes. What Python packages are
missing on the machine it takes from a folder of wheels, which `make gpu-wheels` fills on a machine with a network. A
step that fails, hangs or finds no time left does not stop the others. The report is ``<into>/cuda-<GPU>-<date>.json``,
with a digest of the kernel sources that were measured, and the same in Markdown; it is written again after each step.
"""
