// Whether Python's objects are those that were found: a question that each step of a model asks of thousands.
//
// They lie far apart in memory, and the weights of a step have pushed them out of the caches. Python waits for one after the
// other; here they are fetched together. Python has the same question for where there is no library
// (ds_plugin_sdk/integrations/transformers/understood.py), and for whoever is told no.
#pragma once

#include <cstring>
#include <vector>

#include <ds_kernels/python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace ds_kernels::python {

class List {
 public:
  explicit List(Object* list) : list_(list), size_(PyList_Size(list)) {}
  intptr_t size() const { return size_; }
  Object* operator[](intptr_t i) const { return PyList_GetItem(list_, i); }

  void fetch() const {
    for (intptr_t i = 0; i < size_; ++i) __builtin_prefetch((*this)[i]);
  }

 private:
  Object* list_;
  intptr_t size_;
};

// A dictionary's table of keys: the fifth word in all versions of CPython so far. It is fetched and never read.
inline void fetch_keys(Object* dict) {
  const char* keys = static_cast<const char* const*>(dict)[4];
  __builtin_prefetch(keys);
  __builtin_prefetch(keys + 64);
}

// Where a tensor's elements are, and of which dtype.
struct Place {
  void* data;
  int64_t dtype;
};

// Of each tensor of a list; false if one is none, or has no place.
inline bool find_places(const List& tensors, std::vector<Place>& places) {
  static Object* const name = PyUnicode_InternFromString("_cdata");
  if (tensors.size() < 0) return false;  // it is no list
  std::vector<void*> impls(static_cast<size_t>(tensors.size()));
  for (size_t i = 0; i < impls.size(); ++i) {
    Object* const address = PyObject_GetAttr(tensors[static_cast<intptr_t>(i)], name);
    if (address == nullptr) return false;
    impls[i] = PyLong_AsVoidPtr(address);
    Py_DecRef(address);
    if (impls[i] == nullptr) return false;
    for (int line = 0; line < 4; ++line) __builtin_prefetch(static_cast<const char*>(impls[i]) + 64 * line);
  }
  places.resize(impls.size());
  for (size_t i = 0; i < impls.size(); ++i) {
    // A handle of the stable ABI is an at::Tensor*, which holds one pointer.
    const auto handle = reinterpret_cast<AtenTensorHandle>(&impls[i]);
    int32_t dtype;
    if (aoti_torch_get_data_ptr(handle, &places[i].data) || aoti_torch_get_dtype(handle, &dtype)) return false;
    places[i].dtype = dtype;
  }
  return true;
}

// What `as_found` compares of tensors: (list) -> bytes; None if it cannot.
inline Object* places_function(Object* none, Object* const* arguments, intptr_t count) {
  std::vector<Place> places;
  if (count != 1 || !find_places(List(arguments[0]), places)) {
    PyErr_Clear();
    Py_IncRef(none);
    return none;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(places.data()),
                                   static_cast<intptr_t>(places.size() * sizeof(Place)));
}

inline bool are_as_found(Object* none, const List& objects, const List& types, const List& empty, const List& dicts,
                         const List& names, const List& values, const List& tensors, Object* places) {
  if (objects.size() < 0 || empty.size() < 0 || dicts.size() < 0) return false;
  if (objects.size() != types.size() || dicts.size() != names.size() || dicts.size() != values.size()) return false;
  for (const List* each : {&objects, &empty, &dicts, &tensors}) each->fetch();
  for (intptr_t i = 0; i < dicts.size(); ++i) fetch_keys(dicts[i]);
  for (intptr_t i = 0; i < objects.size(); ++i) {
    Object* const type = PyObject_Type(objects[i]);
    Py_DecRef(type);  // the object keeps it
    if (type != types[i]) return false;
  }
  for (intptr_t i = 0; i < empty.size(); ++i) {
    if (PyDict_Size(empty[i]) != 0) return false;
  }
  for (intptr_t i = 0; i < dicts.size(); ++i) {
    Object* const found = PyDict_GetItem(dicts[i], names[i]);
    if ((found ? found : none) != values[i]) return false;
  }
  std::vector<Place> now;
  if (!find_places(tensors, now)) return false;
  const size_t bytes = now.size() * sizeof(Place);
  return PyBytes_Size(places) == static_cast<intptr_t>(bytes) &&
         (bytes == 0 || std::memcmp(PyBytes_AsString(places), now.data(), bytes) == 0);
}

// (objects, their types, dictionaries without items, dictionaries, a name for each, what each has by it or None, tensors,
// their places) -> 1 if all of that is so.
inline Object* as_found_function(Object* none, Object* const* all, intptr_t count) {
  const bool found = count == 8 && are_as_found(none, List(all[0]), List(all[1]), List(all[2]), List(all[3]), List(all[4]),
                                                List(all[5]), List(all[6]), all[7]);
  PyErr_Clear();
  return PyLong_FromLongLong(found);
}

}  // namespace ds_kernels::python
