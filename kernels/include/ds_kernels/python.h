// What kernels call of Python.
//
// It is in the stable part of CPython's C interface, the same in all versions from 3.10 on, and declared here: Python's
// headers are not on every machine, and differ from version to version. A process that has torch has these functions.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
// Weak: the linker demands that every other symbol is in a library that it is given.
#define DS_KERNELS_PYTHON extern "C" __attribute__((weak))
namespace ds_kernels::python {

using Object = void;  // PyObject
using Function = Object* (*)(Object* self, Object* const* arguments, intptr_t count);

struct Method {  // PyMethodDef
  const char* name;
  Function function;
  int flags;
  const char* text;
};
constexpr int kFastCall = 0x80;  // METH_FASTCALL

DS_KERNELS_PYTHON Object* PyCFunction_NewEx(Method* method, Object* self, Object* module);
DS_KERNELS_PYTHON Object* PyObject_Type(Object* object);
DS_KERNELS_PYTHON Object* PyObject_GetAttr(Object* object, Object* name);
DS_KERNELS_PYTHON Object* PyDict_GetItem(Object* dict, Object* key);
DS_KERNELS_PYTHON intptr_t PyDict_Size(Object* dict);
DS_KERNELS_PYTHON intptr_t PyList_Size(Object* list);
DS_KERNELS_PYTHON Object* PyList_GetItem(Object* list, intptr_t index);
DS_KERNELS_PYTHON Object* PyTuple_GetItem(Object* tuple, intptr_t index);
DS_KERNELS_PYTHON Object* PyBytes_FromStringAndSize(const char* bytes, intptr_t size);
DS_KERNELS_PYTHON char* PyBytes_AsString(Object* bytes);
DS_KERNELS_PYTHON intptr_t PyBytes_Size(Object* bytes);
DS_KERNELS_PYTHON Object* PyUnicode_InternFromString(const char* text);
DS_KERNELS_PYTHON Object* PyLong_FromLongLong(long long value);
DS_KERNELS_PYTHON long long PyLong_AsLongLong(Object* object);
DS_KERNELS_PYTHON void* PyLong_AsVoidPtr(Object* object);
DS_KERNELS_PYTHON double PyFloat_AsDouble(Object* object);
DS_KERNELS_PYTHON void Py_IncRef(Object* object);
DS_KERNELS_PYTHON void Py_DecRef(Object* object);
DS_KERNELS_PYTHON Object* PyErr_Occurred();
DS_KERNELS_PYTHON void PyErr_Clear();
DS_KERNELS_PYTHON void* PyEval_SaveThread();
DS_KERNELS_PYTHON void PyEval_RestoreThread(void* state);

}  // namespace ds_kernels::python
#undef DS_KERNELS_PYTHON
#pragma GCC visibility pop
