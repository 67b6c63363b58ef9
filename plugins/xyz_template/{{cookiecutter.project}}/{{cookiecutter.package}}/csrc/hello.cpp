// A pybind11 op: TORCH_EXTENSION_NAME is the name that its builder gives.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("hello", [] { return "hello from {{ cookiecutter.name }}"; });
}
