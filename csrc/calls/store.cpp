// See store.h.

#include "store.h"

#include <structmember.h>
#include <torch/csrc/Dtype.h>

#include <vector>

namespace ampatch {

namespace {

// The store of this thread's forward pass, and the number of its CacheState. The reference is borrowed: Python owns the
// store until the thread ends.
thread_local struct {
  uint64_t state = 0;
  PyObject* store = nullptr;
} forward_here;

Store* as_store(PyObject* object) {
  return object != nullptr && Py_TYPE(object) == &store_type ? reinterpret_cast<Store*>(object) : nullptr;
}

// The store

PyObject* store_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Store*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->by_type = new Entries[kTypes];
  }
  return reinterpret_cast<PyObject*>(self);
}

int store_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* store = reinterpret_cast<Store*>(self);
  for (int index = 0; store->by_type != nullptr && index < kTypes; ++index) {
    for (const auto& item : store->by_type[index]) {
      Py_VISIT(item.second.cast.get());
      Py_VISIT(item.second.parameter.get());
    }
  }
  return 0;
}

// Deleting an entry may run arbitrary Python code, which may use this store: empty it before deleting the entries.
int store_drop(PyObject* self) {
  auto* store = reinterpret_cast<Store*>(self);
  for (int index = 0; store->by_type != nullptr && index < kTypes; ++index) {
    Entries dropped;
    dropped.swap(store->by_type[index]);
    store->by_type[index].reserve(dropped.size());  // the next iteration will have as many entries
  }
  return 0;
}

void store_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (forward_here.store == self) {
    forward_here.store = nullptr;
  }
  delete[] std::exchange(reinterpret_cast<Store*>(self)->by_type, nullptr);
  Py_TYPE(self)->tp_free(self);
}

PyObject* store_find(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE(count == 2 && is_tensor(args[0]) && THPDtype_Check(args[1]), "expected find(parameter, dtype)");
    const int index = index_of(reinterpret_cast<THPDtype*>(args[1])->scalar_type);
    PyObject* cast = index < 0 ? nullptr : as_store(self)->find(args[0], tensor_of(args[0]), index);
    return Py_NewRef(cast == nullptr ? Py_None : cast);
  });
}

PyObject* store_keep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK_TYPE((count == 2 || (count == 3 && PyBool_Check(args[2]))) && is_tensor(args[0]) && is_tensor(args[1]),
                     "expected keep(parameter, cast, on_any_stream=False)");
    const int index = index_of(tensor_of(args[1]).scalar_type());
    TORCH_CHECK_TYPE(index >= 0, "expected a cast of a type that is cast to");
    if (!as_store(self)->keep(args[0], tensor_of(args[0]), args[1], index, count == 3 && args[2] == Py_True)) {
      return nullptr;
    }
    Py_RETURN_NONE;
  });
}

PyObject* store_forget(PyObject* self, PyObject* ids) {
  const Ref keys = Ref::taken(PySequence_Fast(ids, "expected forget(ids)"));
  if (!keys) {
    return nullptr;
  }
  std::vector<Entry> dropped;  // deleted last: deleting may run arbitrary Python code
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(keys.get()); ++i) {
    auto* key = static_cast<PyObject*>(PyLong_AsVoidPtr(PySequence_Fast_GET_ITEM(keys.get(), i)));
    if (key == nullptr && PyErr_Occurred()) {
      return nullptr;
    }
    for (int index = 0; index < kTypes; ++index) {
      auto& entries = as_store(self)->by_type[index];
      const auto item = entries.find(key);
      if (item != entries.end()) {
        dropped.push_back(std::move(item->second));
        entries.erase(item);
      }
    }
  }
  Py_RETURN_NONE;
}

PyObject* store_clear(PyObject* self, PyObject*) {
  store_drop(self);
  Py_RETURN_NONE;
}

PyObject* store_entries(PyObject* self, PyObject*) {
  struct Kept {
    void* key;
    Ref parameter;
    Ref cast;
  };
  std::vector<Kept> found;  // copied first: making objects may run the garbage collector, and so arbitrary code
  for (int index = 0; index < kTypes; ++index) {
    for (const auto& item : as_store(self)->by_type[index]) {
      found.push_back({item.first, Ref::shared(item.second.parameter.get()), Ref::shared(item.second.cast.get())});
    }
  }
  Ref list = Ref::taken(PyList_New(0));
  for (const auto& kept : found) {
    const Ref key = Ref::taken(PyLong_FromVoidPtr(kept.key));
    const Ref entry = Ref::taken(key ? PyTuple_Pack(3, key.get(), kept.parameter.get(), kept.cast.get()) : nullptr);
    if (!list || !entry || PyList_Append(list.get(), entry.get()) < 0) {
      return nullptr;
    }
  }
  return list.release();
}

Py_ssize_t store_length(PyObject* self) {
  return as_store(self)->size();
}

PyMethodDef store_methods[] = {{"find", fast(store_find), METH_FASTCALL, nullptr},
                               {"keep", fast(store_keep), METH_FASTCALL, nullptr},
                               {"forget", store_forget, METH_O, nullptr},
                               {"clear", store_clear, METH_NOARGS, nullptr},
                               {"entries", store_entries, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

PySequenceMethods store_as_sequence = {store_length};

// The state of a cache

PyObject* cache_state_new(PyTypeObject* type, PyObject*, PyObject*) {
  static uint64_t last = 0;
  auto* self = reinterpret_cast<CacheState*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->iteration = Py_NewRef(Py_None);
    self->frozen = PyTuple_New(0);
    self->number = ++last;
  }
  return reinterpret_cast<PyObject*>(self);
}

int cache_state_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<CacheState*>(self)->iteration);
  Py_VISIT(reinterpret_cast<CacheState*>(self)->frozen);
  return 0;
}

int cache_state_drop(PyObject* self) {
  Py_CLEAR(reinterpret_cast<CacheState*>(self)->iteration);
  Py_CLEAR(reinterpret_cast<CacheState*>(self)->frozen);
  return 0;
}

void cache_state_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  cache_state_drop(self);
  Py_TYPE(self)->tp_free(self);
}

PyObject* cache_state_get_forward(PyObject* self, void*) {
  auto* store = reinterpret_cast<PyObject*>(reinterpret_cast<CacheState*>(self)->for_forward());
  return Py_NewRef(store == nullptr ? Py_None : store);
}

int cache_state_set_forward(PyObject* self, PyObject* value, void*) {
  if (value != Py_None && as_store(value) == nullptr) {
    PyErr_SetString(PyExc_TypeError, "expected forward to be a Store or None");
    return -1;
  }
  forward_here = {reinterpret_cast<CacheState*>(self)->number, value == Py_None ? nullptr : value};
  return 0;
}

PyMemberDef cache_state_members[] = {{"casts", T_LONGLONG, offsetof(CacheState, casts), 0, nullptr},
                                     {"hits", T_LONGLONG, offsetof(CacheState, hits), 0, nullptr},
                                     {"iteration", T_OBJECT_EX, offsetof(CacheState, iteration), 0, nullptr},
                                     {"sweep_at", T_PYSSIZET, offsetof(CacheState, sweep_at), 0, nullptr},
                                     {nullptr, 0, 0, 0, nullptr}};

PyObject* cache_state_get_frozen(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<CacheState*>(self)->frozen);
}

bool is_frozen_block(PyObject* block) {
  return PyTuple_Check(block) && PyTuple_GET_SIZE(block) == 2 && PyFrozenSet_CheckExact(PyTuple_GET_ITEM(block, 0)) &&
         as_store(PyTuple_GET_ITEM(block, 1)) != nullptr;
}

int cache_state_set_frozen(PyObject* self, PyObject* value, void*) {
  bool is_right = value == Py_None || (value != nullptr && PyTuple_CheckExact(value));
  for (Py_ssize_t i = 0; is_right && value != Py_None && i < PyTuple_GET_SIZE(value); ++i) {
    is_right = is_frozen_block(PyTuple_GET_ITEM(value, i));
  }
  if (!is_right) {
    PyErr_SetString(PyExc_TypeError, "expected frozen to be a tuple of tuples of a frozenset and a Store, or None");
    return -1;
  }
  Py_XSETREF(reinterpret_cast<CacheState*>(self)->frozen, Py_NewRef(value));
  return 0;
}

PyGetSetDef cache_state_properties[] = {{"forward", cache_state_get_forward, cache_state_set_forward, nullptr, nullptr},
                                        {"frozen", cache_state_get_frozen, cache_state_set_frozen, nullptr, nullptr},
                                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyTypeObject store_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ampatch._calls.Store"};
PyTypeObject cache_state_type = {PyVarObject_HEAD_INIT(nullptr, 0) "ampatch._calls.CacheState"};

PyObject* Store::find(PyObject* parameter, const Tensor& tensor, int index) const {
  const auto& entries = by_type[index];
  const auto item = entries.find(parameter);
  return item != entries.end() && item->second.counts(parameter, tensor) ? item->second.cast.get() : nullptr;
}

bool Store::keep(PyObject* parameter, const Tensor& tensor, PyObject* cast, int index, bool on_any_stream) {
  Ref reference = Ref::taken(PyWeakref_NewRef(parameter, nullptr));
  if (!reference) {
    return false;
  }
  Entry entry(std::move(reference), tensor, Ref::shared(cast), on_any_stream);
  auto& entries = by_type[index];
  const auto item = entries.find(parameter);
  if (item == entries.end()) {
    entries.emplace(parameter, std::move(entry));
  } else {
    std::swap(item->second, entry);  // deletes the old entry on return: that may run arbitrary code
  }
  return true;
}

Py_ssize_t Store::size() const {
  size_t size = 0;
  for (int index = 0; index < kTypes; ++index) {
    size += by_type[index].size();
  }
  return static_cast<Py_ssize_t>(size);
}

Store* CacheState::for_iteration() const {
  return as_store(iteration);
}

Store* CacheState::for_forward() const {
  return forward_here.state == number ? as_store(forward_here.store) : nullptr;
}

PyObject* CacheState::find_frozen(PyObject* parameter, const Tensor& tensor, int index) const {
  for (Py_ssize_t i = 0; frozen != Py_None && i < PyTuple_GET_SIZE(frozen); ++i) {
    Store* store = as_store(PyTuple_GET_ITEM(PyTuple_GET_ITEM(frozen, i), 1));
    if (PyObject* kept = store->find(parameter, tensor, index)) {
      return kept;
    }
  }
  return nullptr;
}

bool CacheState::may_be_frozen(PyObject* parameter) const {
  if (frozen == Py_None || PyTuple_GET_SIZE(frozen) == 0) {
    return frozen == Py_None;
  }
  const Ref key = Ref::taken(PyLong_FromVoidPtr(parameter));
  for (Py_ssize_t i = 0; key && i < PyTuple_GET_SIZE(frozen); ++i) {
    if (PySet_Contains(PyTuple_GET_ITEM(PyTuple_GET_ITEM(frozen, i), 0), key.get()) == 1) {
      return true;
    }
  }
  return !key;
}

bool add_store_types(PyObject* module) {
  constexpr unsigned long collected = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  store_type.tp_basicsize = sizeof(Store);
  store_type.tp_flags = collected;
  store_type.tp_new = store_new;
  store_type.tp_dealloc = store_dealloc;
  store_type.tp_traverse = store_traverse;
  store_type.tp_clear = store_drop;
  store_type.tp_methods = store_methods;
  store_type.tp_as_sequence = &store_as_sequence;
  cache_state_type.tp_basicsize = sizeof(CacheState);
  cache_state_type.tp_flags = collected;
  cache_state_type.tp_new = cache_state_new;
  cache_state_type.tp_dealloc = cache_state_dealloc;
  cache_state_type.tp_traverse = cache_state_traverse;
  cache_state_type.tp_clear = cache_state_drop;
  cache_state_type.tp_members = cache_state_members;
  cache_state_type.tp_getset = cache_state_properties;
  return PyModule_AddType(module, &store_type) == 0 && PyModule_AddType(module, &cache_state_type) == 0;
}

}  // namespace ampatch
