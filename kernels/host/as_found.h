// Whether Python's objects are those that were found, and whether tensors' numbers are: questions that each step of a model
// asks of thousands.
//
// They lie far apart in memory, and the weights of a step have pushed them out of the caches. Python waits for one after the
// other; here they are fetched together. Python has the same question for where there is no library
// (ds_plugin_sdk/integrations/transformers/as_found.py).
#pragma once

#include <cstring>
#include <numeric>
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

// A dictionary's table of keys: its fifth word in all versions of CPython that have a global lock. It is fetched and never
// read.
inline void fetch_keys(Object* dict) {
  const char* keys = static_cast<const char* const*>(dict)[4];
  __builtin_prefetch(keys);
  __builtin_prefetch(keys + 64);
}

// torch's pointers to the at::TensorImpl of tensors; false if one has none.
inline bool find_impls(const List& tensors, std::vector<void*>& impls) {
  static Object* const name = PyUnicode_InternFromString("_cdata");
  if (tensors.size() < 0) return false;  // it is no list
  impls.resize(static_cast<size_t>(tensors.size()));
  for (size_t i = 0; i < impls.size(); ++i) {
    Object* const address = PyObject_GetAttr(tensors[static_cast<intptr_t>(i)], name);
    if (address == nullptr) return false;
    impls[i] = PyLong_AsVoidPtr(address);
    Py_DecRef(address);
    if (impls[i] == nullptr) return false;
    for (int line = 0; line < 4; ++line) __builtin_prefetch(static_cast<const char*>(impls[i]) + 64 * line);
  }
  return true;
}

// A handle of the stable ABI is an at::Tensor*, which holds one pointer.
inline AtenTensorHandle handle_of(void*& impl) { return reinterpret_cast<AtenTensorHandle>(&impl); }

// Where a tensor's elements are, how many, of which dtype, and whether they lie by rows.
struct Place {
  void* data;
  int64_t numel;
  int32_t dtype, contiguous;
};

// Of each tensor of a list; false if one is none, or has no place.
inline bool find_places(const List& tensors, std::vector<Place>& places) {
  std::vector<void*> impls;
  if (!find_impls(tensors, impls)) return false;
  places.resize(impls.size());
  for (size_t i = 0; i < impls.size(); ++i) {
    const AtenTensorHandle handle = handle_of(impls[i]);
    bool contiguous;
    if (aoti_torch_get_data_ptr(handle, &places[i].data) || aoti_torch_get_dtype(handle, &places[i].dtype)) return false;
    if (aoti_torch_is_contiguous(handle, &contiguous) || aoti_torch_get_numel(handle, &places[i].numel)) return false;
    places[i].contiguous = contiguous;
  }
  return true;
}

// What is kept of a tensor: numbers that are others if one of the lines that were looked at is.
struct Digest {
  uint64_t words[8] = {};

  // Another line is another result, whatever follows.
  void add(const char* line, size_t bytes) {
    uint64_t read[8] = {};
    std::memcpy(read, line, bytes);
    for (int i = 0; i < 8; ++i) {
      const uint64_t mixed = (words[i] ^ read[i]) * 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio
      words[i] = mixed ^ mixed >> 32;
    }
  }
};

constexpr size_t kLine = 64, kFewRows = 64, kFetched = 32;

// Memory in rows, of which a line each is looked at, in another place of each. A vector's rows are its lines.
struct LinesOfRows {
  const char* first;
  size_t bytes, row, rows, places, step;

  LinesOfRows(const void* data, size_t bytes, size_t row)
      : first(static_cast<const char*>(data)), bytes(bytes), row(row < kLine ? kLine : row) {
    rows = (bytes + this->row - 1) / this->row;
    places = (this->row + kLine - 1) / kLine;
    step = step_of(places);
  }

  // From one place to the next. All have their turn, and of few turns no part of a matrix has none: multiples of the golden
  // ratio, without their whole parts, lie evenly.
  static size_t step_of(size_t places) {
    size_t step = places * 618 / 1000;
    if (step == 0) return 1;
    while (std::gcd(step, places) != 1) ++step;
    return step;
  }

  const char* line(size_t r, size_t turn) const {
    const size_t place = turn * step % places * kLine;
    return first + r * row + (place + kLine > row ? row - kLine : place);
  }

  // Of one row of `each`, but of 64 at least, the first and the last one among them; of just these if it is 0.
  Digest digest(size_t each) const {
    const size_t part = each ? (rows + each - 1) / each : 0, few = rows < kFewRows ? rows : kFewRows;
    const size_t count = part > few ? part : few;
    const auto at = [&](size_t i) { return line(count == rows ? i : i * (rows - 1) / (count - 1), i); };
    Digest found;
    for (size_t i = 0; i < count && i < kFetched; ++i) __builtin_prefetch(at(i));
    for (size_t i = 0; i < count; ++i) {
      if (i + kFetched < count) __builtin_prefetch(at(i + kFetched));
      const size_t left = static_cast<size_t>(first + bytes - at(i));
      found.add(at(i), left < kLine ? left : kLine);
    }
    return found;
  }
};

// Adds what is kept of a tensor. False if it is not contiguous in host memory.
inline bool add_digest(void* impl, size_t each, std::vector<Digest>& digests) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  const AtenTensorHandle handle = handle_of(impl);
  int32_t device, dtype;
  int64_t numel, dim, *sizes;
  bool contiguous;
  void* data;
  if (aoti_torch_get_device_type(handle, &device) || device != cpu) return false;
  if (aoti_torch_is_contiguous(handle, &contiguous) || !contiguous) return false;
  if (aoti_torch_get_numel(handle, &numel) || aoti_torch_get_dtype(handle, &dtype)) return false;
  if (aoti_torch_get_dim(handle, &dim) || aoti_torch_get_sizes(handle, &sizes)) return false;
  if (aoti_torch_get_data_ptr(handle, &data) || (data == nullptr && numel > 0)) return false;
  const size_t size = aoti_torch_dtype_element_size(dtype);
  const size_t row = dim < 2 ? kLine : static_cast<size_t>(sizes[dim - 1]) * size;
  digests.push_back(LinesOfRows(data, static_cast<size_t>(numel) * size, row).digest(each));
  return true;
}

template <class Value>
Object* bytes_or_none(bool known, const std::vector<Value>& values, Object* none) {
  if (known) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()),
                                     static_cast<intptr_t>(values.size() * sizeof(Value)));
  }
  PyErr_Clear();
  Py_IncRef(none);
  return none;
}

// (tensors) -> bytes that `as_found` compares; None where it cannot.
inline Object* places_function(Object* none, Object* const* arguments, intptr_t count) {
  std::vector<Place> places;
  const bool known = count == 1 && find_places(List(arguments[0]), places);
  return bytes_or_none(known, places, none);
}

// (tensors, one row of how many, or 0) -> bytes, the same as long as the numbers that are looked at are; None where
// these are not to be had.
inline Object* samples_function(Object* none, Object* const* arguments, intptr_t count) {
  std::vector<void*> impls;
  std::vector<Digest> digests;
  bool known = count == 2 && find_impls(List(arguments[0]), impls);
  const long long each = known ? PyLong_AsLongLong(arguments[1]) : 0;
  for (void*& impl : impls) known = known && add_digest(impl, static_cast<size_t>(each), digests);
  return bytes_or_none(known, digests, none);
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
