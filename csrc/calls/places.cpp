// See places.h.

#include "places.h"

#include <c10/util/flat_hash_map.h>

#include <bitset>
#include <cstddef>
#include <cstdint>

namespace ampatch {

namespace {

PyObject* name_dict;

// A set of addresses. Nearly all addresses asked for are in no set: one bit, which stays in the cache, tells that.
class Addresses {
 public:
  void add(PyObject* object) {
    may_have_.set(bit_of(object));
    all_.insert(object);
  }
  bool has(PyObject* object) const {
    return may_have_.test(bit_of(object)) && all_.find(object) != all_.end();
  }

 private:
  static constexpr size_t kBits = 1 << 16;

  static size_t bit_of(PyObject* object) {
    return reinterpret_cast<uintptr_t>(object) / alignof(max_align_t) % kBits;
  }

  std::bitset<kBits> may_have_;
  ska::flat_hash_set<PyObject*> all_;
};

// True if a dict has one of some objects as a value. Compares addresses only: no code of the values runs.
bool has_one_of(PyObject* attributes, const Addresses& wanted) {
  PyObject* value;
  for (Py_ssize_t position = 0; PyDict_Next(attributes, &position, nullptr, &value);) {
    if (wanted.has(value)) {
      return true;
    }
  }
  return false;
}

// holders(owners, wanted): returns a list of the owners whose attributes include one of the wanted objects, in the same
// order. Includes an owner whose `__dict__` is no dict: the caller inspects it. Like `object.__getattribute__`, reads
// `__dict__` past the class's own `__getattribute__`.
PyObject* holders(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(count == 2 && PyList_CheckExact(args[0]) && PyList_CheckExact(args[1]),
                     "expected holders(list, list)");
    Addresses wanted;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
      wanted.add(PyList_GET_ITEM(args[1], i));
    }
    Ref found = Ref::taken(PyList_New(0));
    for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(args[0]); ++i) {
      const Ref owner = Ref::shared(PyList_GET_ITEM(args[0], i));
      const Ref attributes = Ref::taken(PyObject_GenericGetAttr(owner.get(), name_dict));
      if (!attributes) {
        return nullptr;
      }
      const bool is_holder = !PyDict_Check(attributes.get()) || has_one_of(attributes.get(), wanted);
      if (is_holder && PyList_Append(found.get(), owner.get()) < 0) {
        return nullptr;
      }
    }
    return found.release();
  });
}

PyMethodDef functions[] = {{"holders", fast(holders), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_places_functions(PyObject* module) {
  name_dict = PyUnicode_InternFromString("__dict__");
  return name_dict != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace ampatch
