/* The compiled face: one call of the C API from Python in one step, for calls of a kind that Python has checked before.
 *
 * It knows neither operations nor rules. deep_ep/_face.py compiles, from the first call of a kind, a plan: the bytes of
 * the structs that the C API takes, the places in them that differ from call to call, and the outputs. A later call
 * whose arguments have the same properties follows the plan: Site.call looks at the tensors, allocates the outputs,
 * fills a copy of the structs, keeps the tensors where Python wants them kept, and enters the library. Whatever it does
 * not know it leaves to Python, and it raises nothing of its own.
 *
 * The module needs Python's stable ABI alone. torch's functions are those of its C ABI (aoti_torch_*), whose addresses
 * Python hands in, so that the module loads with any torch, or none. It runs no Python code, and holds the GIL: no
 * signal handler and no other thread comes in between, but where torch's allocator is told of another stream. */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "deepep.h"

enum { kStrided = 0 }; /* of torch's layouts */
enum { kMaxTensors = 16, kMaxDims = 8, kMaxOutputs = 12, kMaxKey = 1024, kMaxBlob = 2048, kMaxNumbers = 12 };

typedef void *Tensor;      /* AtenTensorHandle: points to an at::Tensor, which is one pointer, to its implementation */
typedef void *TensorRef;   /* at::Tensor & */
typedef void *StreamGuard; /* CUDAStreamGuardHandle */
typedef struct Stream {    /* c10::Stream */
  int8_t type, index;      /* of the device */
  int64_t id;
} Stream;
typedef deepep_status_t (*EnterFn)(deepep_buffer_t buffer, void *a, void *b, void *c);

/* ---- What Python hands in */

static struct {
  int32_t (*get_data_ptr)(Tensor, void **);
  int32_t (*get_layout)(Tensor, int32_t *);
  int32_t (*get_dim)(Tensor, int64_t *);
  int32_t (*get_sizes)(Tensor, int64_t **);
  int32_t (*get_strides)(Tensor, int64_t **);
  int32_t (*get_dtype)(Tensor, int32_t *);
  int32_t (*get_device_type)(Tensor, int32_t *);
  int32_t (*get_device_index)(Tensor, int32_t *);
  int32_t (*get_storage_size)(Tensor, int64_t *);
  int32_t (*get_storage_offset)(Tensor, int64_t *);
  size_t (*dtype_element_size)(int32_t);
  int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);
  int32_t (*reinterpret)(Tensor, int64_t, const int64_t *, const int64_t *, int64_t, Tensor *);
  int32_t (*delete_tensor_object)(Tensor);
  /* as another dtype; may be missing */
  int32_t (*view_on_cpu)(Tensor, int32_t, Tensor *);
  int32_t (*view_on_cuda)(Tensor, int32_t, Tensor *);
  PyObject *(*wrap)(Tensor); /* of libtorch_python: an object for one more holder of the tensor; may be missing */
  /* make a CUDA stream current, and what was so before; may be missing */
  int32_t (*enter_stream)(void *, int32_t, StreamGuard *);
  int32_t (*leave_stream)(StreamGuard);
  void (*record_stream)(TensorRef, Stream); /* of libtorch_cuda: the allocator's part of it alone; may be missing */
} torch;

static PyObject *tensor_type, *wrap, *num_modes, *without_modes, *in_inference, *inference_guard; /* of torch */
static PyObject *name_cdata, *name_enter, *name_exit, *name_record_stream, *name_is_ready, *name_enter_core, *name_run,
    *name_refuse, *name_let_go, *name_event, *name_new_launch, *name_launch, *name_after, *name_user_of, *name_is_neg;
/* The attributes of an EventHandle, in the order in which `start` sets them. */
static const char *const handle_attributes[] = {"_core", "_home", "_users", "_stream", "_torch", "_launch"};
enum { kHandleAttributes = 6 };
static PyObject *handle_names[kHandleAttributes];

/* ---- Tensors */

typedef struct Seen {
  void *impl; /* an at::Tensor of our own: never counted, alive as long as the argument */
  int64_t num_dims, *sizes, *strides;
  void *address;
} Seen;

/* 1: `seen` describes the tensor; 0: it is not a plain tensor. */
static int look(PyObject *object, Seen *seen) {
  PyObject *number;
  int32_t layout;
  if ((PyObject *)Py_TYPE(object) != tensor_type) return 0;
  number = PyObject_GetAttr(object, name_cdata);
  if (number == NULL) {
    PyErr_Clear();
    return 0;
  }
  seen->impl = PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  if (seen->impl == NULL) {
    PyErr_Clear();
    return 0;
  }
  /* torch writes a trace to stderr where it is asked for the memory of a tensor that has none of its own */
  if (torch.get_layout(&seen->impl, &layout) || layout != kStrided) return 0;
  return torch.get_dim(&seen->impl, &seen->num_dims) == 0 && seen->num_dims <= kMaxDims &&
         torch.get_sizes(&seen->impl, &seen->sizes) == 0 && torch.get_strides(&seen->impl, &seen->strides) == 0 &&
         torch.get_data_ptr(&seen->impl, &seen->address) == 0;
}

static int is_contiguous(const Seen *t) {
  int64_t expected = 1, i;
  for (i = 0; i < t->num_dims; i++)
    if (t->sizes[i] == 0) return 1;
  for (i = t->num_dims - 1; i >= 0; i--) {
    if (t->sizes[i] != 1 && t->strides[i] != expected) return 0;
    expected *= t->sizes[i];
  }
  return 1;
}

/* 1: every element lies in the tensor's storage, which a caller may have made smaller or freed since. */
static int is_whole(Seen *t, int32_t dtype) {
  int64_t bytes, first, last, width = (int64_t)torch.dtype_element_size(dtype), i;
  if (torch.get_storage_size(&t->impl, &bytes) || torch.get_storage_offset(&t->impl, &first)) return 0;
  for (last = first, i = 0; i < t->num_dims; i++) {
    if (t->sizes[i] == 0) return 1;
    last += (t->sizes[i] - 1) * t->strides[i];
  }
  /* a storage at address 0 is a tracer's, or freed */
  return (uintptr_t)t->address != (uintptr_t)(first * width) && last < bytes / width;
}

/* torch's function that makes an object of a handle is said to take the handle over, and in some versions only copies
 * it: then the handle is ours to delete, or the memory would never be free again. Python finds out which it is. */
static int wrap_copies;

/* An object of torch's for a tensor, which it takes over. */
static PyObject *to_python(Tensor tensor) {
  PyObject *result = NULL, *capsule;
  if (torch.wrap != NULL) {
    result = torch.wrap(tensor);
    torch.delete_tensor_object(tensor);
    return result;
  }
  capsule = PyCapsule_New(tensor, NULL, NULL);
  if (capsule != NULL) {
    result = PyObject_CallFunctionObjArgs(wrap, capsule, NULL);
    Py_DECREF(capsule);
  }
  if (result == NULL || wrap_copies) torch.delete_tensor_object(tensor);
  return result;
}

/* 1: the tensor's values are its bytes with the sign turned round, as the imaginary part of a conjugate's are, which
 * torch's C ABI hides. Only tensors that may have gaps are asked: a part of a complex tensor has them. */
static int is_negative(PyObject *object) {
  PyObject *value = PyObject_CallMethodObjArgs(object, name_is_neg, NULL);
  int negative = value != Py_False;
  Py_XDECREF(value);
  if (value == NULL) PyErr_Clear();
  return negative;
}

/* ---- Guards around the whole of a call: torch's modes are Python code, and outputs may have to be ordinary tensors */

static int is_set(PyObject *function) {
  PyObject *value = PyObject_CallNoArgs(function);
  int set = value != NULL && PyObject_IsTrue(value) == 1;
  Py_XDECREF(value);
  if (value == NULL) PyErr_Clear();
  return set;
}

static PyObject *enter_guard(PyObject *maker, PyObject *argument) {
  PyObject *guard = PyObject_CallFunctionObjArgs(maker, argument, NULL), *entered;
  if (guard == NULL) return NULL;
  entered = PyObject_CallMethodObjArgs(guard, name_enter, NULL);
  if (entered == NULL) {
    Py_DECREF(guard);
    return NULL;
  }
  Py_DECREF(entered);
  return guard;
}

static void leave_guard(PyObject *guard) {
  PyObject *type, *value, *trace, *left;
  if (guard == NULL) return;
  PyErr_Fetch(&type, &value, &trace);
  left = PyObject_CallMethodObjArgs(guard, name_exit, Py_None, Py_None, Py_None, NULL);
  if (left == NULL) PyErr_Clear();
  Py_XDECREF(left);
  Py_DECREF(guard);
  PyErr_Restore(type, value, trace);
}

/* ---- A CUDA stream that is current for a while */

static int has_guards(void) { return torch.enter_stream != NULL && torch.leave_stream != NULL; }

static void leave_stream(StreamGuard guard) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  torch.leave_stream(guard);
  PyErr_Restore(type, value, trace);
}

/* ---- Site */

typedef struct Site {
  PyObject ob_base;
  deepep_buffer_t buffer;
  PyObject *kept, *plans;
  PyObject *core, *raw_stream;  /* of Python's: the buffer, and the function that gives the caller's stream */
  PyObject *handle_type, *idle; /* EventHandle; launches with an event, for the next asynchronous call */
  PyObject *users;              /* by the caller's stream: see Core.user_of */
  void *communication;          /* the communication stream, and its device */
  int device;
  int num_tensors, num_scalars, num_numbers, ordinary;
  uint32_t free_dims[kMaxTensors]; /* a bit for each dimension that a plan does not depend on */
  uint32_t strided;                /* a bit for each tensor that need not be contiguous */
} Site;

/* What a call gives. */
typedef struct Given {
  PyObject *const *objects;
  Seen tensors[kMaxTensors];
  int64_t numbers[kMaxNumbers];
} Given;

typedef struct Writer {
  unsigned char bytes[kMaxKey];
  size_t used;
  int full;
} Writer;

static void put(Writer *w, int64_t value) {
  if (w->used + sizeof value > sizeof w->bytes) {
    w->full = 1;
    return;
  }
  memcpy(w->bytes + w->used, &value, sizeof value);
  w->used += sizeof value;
}

enum { kNone = -1, kBool = -2, kInt = -3 };

/* Every property of the arguments that a check looks at, but for the lengths that differ from call to call. */
static int describe(const Site *site, Given *given, Writer *key) {
  int i;
  int64_t d;
  for (i = 0; i < site->num_tensors; i++) {
    Seen *t = &given->tensors[i];
    int32_t dtype, type, index;
    if (given->objects[i] == Py_None) {
      put(key, kNone);
      t->impl = t->address = NULL;
      t->num_dims = 0;
      continue;
    }
    if (!look(given->objects[i], t)) return 0;
    if (torch.get_dtype(&t->impl, &dtype) || torch.get_device_type(&t->impl, &type) ||
        torch.get_device_index(&t->impl, &index) || !is_whole(t, dtype))
      return 0;
    put(key, t->num_dims);
    put(key, dtype);
    put(key, (int64_t)type << 32 | (uint32_t)index);
    if (site->strided >> i & 1 ? is_negative(given->objects[i]) : !is_contiguous(t)) return 0;
    for (d = 0; d < t->num_dims; d++)
      if (!(site->free_dims[i] >> d & 1)) put(key, t->sizes[d]);
  }
  for (i = 0; i < site->num_scalars; i++) {
    PyObject *value = given->objects[site->num_tensors + i];
    long long number = 0;
    if (value == Py_None) {
      put(key, kNone);
      continue;
    }
    if (value != Py_True && value != Py_False && !PyLong_CheckExact(value)) return 0;
    number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return 0;
    }
    put(key, PyLong_CheckExact(value) ? kInt : kBool);
    put(key, number);
  }
  return !key->full;
}

/* A plan is a tuple (blob, program): the structs' bytes, and numbers of 8 bytes, read in this order. */
typedef struct Reader {
  const int64_t *at, *end;
} Reader;

static int64_t next(Reader *r) { return r->at < r->end ? *r->at++ : 0; }

/* Where a number comes from; deep_ep/_face.py has the same names. */
enum { kConstant = 0, kSize = 1, kNumber = 2, kStride = 3, kAddress = 4, kOutput = 5, kBlob = 6 };
enum { kStructs = -1 }; /* among the offsets to read: the structs as the call has left them */

typedef struct Work {
  const Given *given;
  unsigned char *blob;
  void *addresses[kMaxOutputs]; /* of the outputs */
} Work;

static int64_t value_of(Reader *r, const Work *work) {
  int64_t kind = next(r), a = next(r), b = next(r);
  switch (kind) {
    case kSize: return b < work->given->tensors[a].num_dims ? work->given->tensors[a].sizes[b] : 0;
    case kNumber: return work->given->numbers[a];
    case kStride: return b < work->given->tensors[a].num_dims ? work->given->tensors[a].strides[b] : 0;
    case kAddress: return (int64_t)(intptr_t)work->given->tensors[a].address;
    case kOutput: return (int64_t)(intptr_t)work->addresses[a];
    case kBlob: return (int64_t)(intptr_t)(work->blob + a);
    default: return a;
  }
}

/* An output as a plan describes it. */
typedef struct Output {
  int64_t base; /* the output of which it is a view; else kAlone, or of which slab it is a part */
  int64_t dtype, type, index, width, num_dims, strided, offset;
  int64_t sizes[kMaxDims], strides[kMaxDims];
  int64_t place; /* in its slab, bytes */
} Output;

/* Outputs that live equally long share an allocation, a slab: to allocate costs more than a view. Two of its tensors
 * do not share a cache line, nor what a bulk copy wants to be aligned. */
enum { kAlone = -1, kFirstSlab = -2, kMaxSlabs = 2, kSlabAlign = 256, kMaxViews = 4 };

/* Operators of torch declare that their outputs share nothing: how many of them run. */
static int operators;

typedef int32_t (*ViewFn)(Tensor, int32_t, Tensor *);
static ViewFn view_on(int64_t device_type) { return device_type == 0 ? torch.view_on_cpu : torch.view_on_cuda; }
static int may_share(const Output *out) { return operators == 0 && view_on(out->type) != NULL; }

typedef struct Slab {
  int64_t bytes, width, dtype; /* an element is of the first output's type */
  Tensor views[kMaxViews];     /* all of it: [0] as allocated, then as other types */
  int64_t dtypes[kMaxViews];
  int num_views, num_outputs;
} Slab;

static int read_output(Reader *r, const Work *work, Output *out) {
  int64_t step = 1, d;
  out->base = next(r), out->dtype = next(r), out->type = next(r), out->index = next(r), out->width = next(r);
  out->num_dims = next(r), out->strided = next(r), out->offset = 0;
  if (out->num_dims > kMaxDims || out->base < kFirstSlab - kMaxSlabs + 1) return 0;
  for (d = 0; d < out->num_dims; d++) out->sizes[d] = value_of(r, work);
  for (d = out->num_dims - 1; d >= 0; d--) {
    out->strides[d] = step;
    step *= out->sizes[d] > 1 ? out->sizes[d] : 1;
  }
  if (out->num_dims >= 0 && out->strided) {
    for (d = 0; d < out->num_dims; d++) out->strides[d] = next(r);
    out->offset = next(r);
  }
  return 1;
}

static void place_in_slab(Output *out, Slab *slab) {
  int64_t bytes = out->width, d;
  for (d = 0; d < out->num_dims; d++) bytes *= out->sizes[d];
  if (slab->width == 0) slab->width = out->width, slab->dtype = out->dtype;
  out->place = slab->bytes;
  slab->bytes += (bytes + kSlabAlign - 1) / kSlabAlign * kSlabAlign;
  slab->num_outputs++;
}

/* The whole slab as elements of the output's type. NULL: it cannot be had. */
static Tensor slab_as(Slab *slab, const Output *out) {
  int i;
  Tensor *at = slab->views;
  if (slab->num_views == 0) {
    int64_t length = slab->bytes / slab->width, step = 1;
    if (torch.empty_strided(1, &length, &step, (int32_t)slab->dtype, (int32_t)out->type, (int32_t)out->index, at))
      return NULL;
    slab->dtypes[slab->num_views++] = slab->dtype;
  }
  for (i = 0; i < slab->num_views; i++)
    if (slab->dtypes[i] == out->dtype) return at[i];
  if (i == kMaxViews || view_on(out->type)(at[0], (int32_t)out->dtype, &at[i])) return NULL;
  slab->dtypes[slab->num_views++] = out->dtype;
  return at[i];
}

static void drop_slabs(Slab *slabs) {
  int i, k;
  for (i = 0; i < kMaxSlabs; i++)
    for (k = 0; k < slabs[i].num_views; k++) torch.delete_tensor_object(slabs[i].views[k]);
}

/* An output as an object: a new tensor, a view of an earlier one or of a slab, or None. NULL: it cannot be had. */
static PyObject *make_output(const Output *out, Slab *slabs, PyObject *const *earlier, void **address) {
  Tensor tensor = NULL;
  int32_t failed;
  *address = NULL;
  if (out->num_dims < 0) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  if (out->base >= 0) {
    Seen of;
    if (!look(earlier[out->base], &of)) return NULL;
    failed = torch.reinterpret(&of.impl, out->num_dims, out->sizes, out->strides, out->offset, &tensor);
  } else if (out->base <= kFirstSlab && slabs[kFirstSlab - out->base].num_outputs > 1) {
    Tensor whole = slab_as(&slabs[kFirstSlab - out->base], out);
    failed = whole == NULL ||
             torch.reinterpret(whole, out->num_dims, out->sizes, out->strides, out->place / out->width, &tensor);
  } else {
    failed = torch.empty_strided(out->num_dims, out->sizes, out->strides, (int32_t)out->dtype, (int32_t)out->type,
                                 (int32_t)out->index, &tensor);
  }
  if (failed || tensor == NULL) return NULL;
  if (torch.get_data_ptr(tensor, address)) {
    torch.delete_tensor_object(tensor);
    return NULL;
  }
  return to_python(tensor);
}

static void drop(PyObject **objects, int count) {
  while (count > 0) Py_DECREF(objects[--count]);
}

/* kept[launch] = the tensors of the call. */
static int keep(const Site *site, PyObject *launch, const Given *given, PyObject *const *outputs, int num_outputs) {
  int i, failed;
  PyObject *held = PyTuple_New(site->num_tensors + num_outputs);
  if (held == NULL) return 0;
  for (i = 0; i < site->num_tensors + num_outputs; i++) {
    PyObject *one = i < site->num_tensors ? given->objects[i] : outputs[i - site->num_tensors];
    Py_INCREF(one);
    PyTuple_SetItem(held, i, one);
  }
  failed = PyObject_SetItem(site->kept, launch, held);
  Py_DECREF(held);
  return !failed;
}

/* Torch's allocator learns that a stream uses a tensor. `user`: of Core.user_of. 0, with Python's error set: it does
 * not. */
static int record_user(PyObject *tensor, PyObject *user) {
  PyObject *done;
  Seen seen;
  if (tensor == Py_None) return 1;
  if (torch.record_stream != NULL && PyTuple_Size(user) == 4 && look(tensor, &seen)) {
    Stream stream = {(int8_t)PyLong_AsLong(PyTuple_GetItem(user, 3)), (int8_t)PyLong_AsLong(PyTuple_GetItem(user, 2)),
                     PyLong_AsLongLong(PyTuple_GetItem(user, 1))};
    if (PyErr_Occurred()) return 0;
    torch.record_stream(&seen.impl, stream);
    return 1;
  }
  done = PyObject_CallMethodObjArgs(tensor, name_record_stream, PyTuple_GetItem(user, 0), NULL);
  Py_XDECREF(done);
  return done != NULL;
}

/* Each storage that is made here once. */
static int record_all(PyObject *user, const Output *described, PyObject *const *outputs, int num_outputs) {
  int i, slabs = 0; /* a bit for each that was recorded */
  for (i = 0; i < num_outputs; i++) {
    int slab = described[i].base <= kFirstSlab ? 1 << (kFirstSlab - described[i].base) : 0;
    if (described[i].base >= 0 || (slab & slabs)) continue;
    if (!record_user(outputs[i], user)) return 0;
    slabs |= slab;
  }
  return 1;
}

static PyObject *nothing(void) {
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Follows a plan. The tensors are kept under `launch`, unless that is None. */
static PyObject *follow(const Site *site, PyObject *launch, PyObject *user, const Given *given, PyObject *plan) {
  _Alignas(16) unsigned char blob[kMaxBlob];
  PyObject *outputs[kMaxOutputs], *result;
  Output described[kMaxOutputs];
  Slab slabs[kMaxSlabs] = {{0}};
  Work work = {given, blob, {NULL}};
  Reader r;
  char *start, *program;
  Py_ssize_t blob_bytes, program_bytes;
  int64_t count, num_outputs, num_reads, i, a, b, c;
  int made = 0;
  int32_t status;
  EnterFn enter;
  if (PyBytes_AsStringAndSize(PyTuple_GetItem(plan, 0), &start, &blob_bytes) || blob_bytes > kMaxBlob ||
      PyBytes_AsStringAndSize(PyTuple_GetItem(plan, 1), &program, &program_bytes))
    return nothing();
  r.at = (const int64_t *)(const void *)program;
  r.end = r.at + program_bytes / (Py_ssize_t)sizeof *r.at;
  for (count = next(&r); count > 0; count--) { /* lengths that are the same in all calls of the kind */
    int64_t one = value_of(&r, &work), other = value_of(&r, &work);
    if (one != other) return nothing();
  }
  memcpy(blob, start, (size_t)blob_bytes);
  num_outputs = next(&r);
  if (num_outputs > kMaxOutputs) return nothing();
  for (i = 0; i < num_outputs; i++) {
    if (!read_output(&r, &work, &described[i])) return nothing();
    if (described[i].base <= kFirstSlab && !may_share(&described[i])) described[i].base = kAlone;
    if (described[i].base <= kFirstSlab) place_in_slab(&described[i], &slabs[kFirstSlab - described[i].base]);
  }
  for (; made < num_outputs; made++) {
    outputs[made] = make_output(&described[made], slabs, outputs, &work.addresses[made]);
    if (outputs[made] == NULL) break;
  }
  drop_slabs(slabs);
  if (made < num_outputs) {
    drop(outputs, made);
    return nothing();
  }
  for (count = next(&r); count > 0; count--) {
    int64_t offset = next(&r), width = next(&r), value = value_of(&r, &work);
    if (width == 4) {
      int32_t narrow = (int32_t)value;
      if (narrow != value) { /* the library says what is wrong with such a length */
        drop(outputs, made);
        return nothing();
      }
      memcpy(blob + offset, &narrow, sizeof narrow);
    } else {
      memcpy(blob + offset, &value, sizeof value);
    }
  }
  enter = (EnterFn)(intptr_t)next(&r);
  a = next(&r), b = next(&r), c = next(&r);
  num_reads = next(&r);
  result = PyTuple_New((Py_ssize_t)(num_reads + num_outputs));
  if (result == NULL || (user != Py_None && !record_all(user, described, outputs, made)) ||
      (launch != Py_None && !keep(site, launch, given, outputs, made))) {
    Py_XDECREF(result);
    drop(outputs, made);
    return NULL;
  }
  status = enter(site->buffer, blob + a, blob + b, c < 0 ? NULL : blob + c);
  if (status != 0) {
    Py_DECREF(result);
    drop(outputs, made);
    return Py_BuildValue("[i]", (int)status);
  }
  for (i = 0; i < num_reads; i++) {
    uint64_t value;
    int64_t offset = next(&r);
    if (offset == kStructs) {
      PyTuple_SetItem(result, (Py_ssize_t)i, PyBytes_FromStringAndSize((const char *)blob, blob_bytes));
      continue;
    }
    memcpy(&value, blob + offset, sizeof value);
    PyTuple_SetItem(result, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(value));
  }
  for (i = 0; i < num_outputs; i++) PyTuple_SetItem(result, (Py_ssize_t)(num_reads + i), outputs[i]);
  return result;
}

/* ---- Results in the shape that the caller of the operation gets */

/* The second half of a call, for its caller to issue, once. */
typedef struct Hook {
  PyObject ob_base;
  EnterFn enter; /* NULL: Python issues it */
  deepep_buffer_t buffer;
  uint64_t receives; /* the first 8 bytes of its structs */
  int64_t second;    /* where the second struct lies */
  int goes_on;       /* the call may still use its tensors when nobody has called the hook */
  PyObject *structs, *held, *owner;
} Hook;

static PyTypeObject *hook_type;

/* The status of a call with a copy of the structs that an earlier one has left, whose first 8 bytes are others. */
static int32_t enter_again(const Hook *hook, const char *structs, Py_ssize_t bytes) {
  _Alignas(16) unsigned char blob[kMaxBlob];
  memcpy(blob, structs, (size_t)bytes);
  memcpy(blob, &hook->receives, sizeof hook->receives);
  return hook->enter(hook->buffer, blob, blob + hook->second, NULL);
}

static PyObject *hook_call(PyObject *self, PyObject *args, PyObject *keywords) {
  Hook *hook = (Hook *)self;
  PyObject *structs = hook->structs, *held = hook->held, *result;
  char *start;
  Py_ssize_t bytes;
  if (PyTuple_Size(args) != 0 || (keywords != NULL && PyDict_Size(keywords) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a hook takes no arguments");
    return NULL;
  }
  if (structs == NULL) return PyObject_CallMethodObjArgs(hook->owner, name_refuse, Py_None, NULL);
  hook->structs = hook->held = NULL;
  if (hook->enter == NULL) {
    result = PyObject_CallMethodObjArgs(hook->owner, name_run, structs, held, NULL);
  } else if (PyBytes_AsStringAndSize(structs, &start, &bytes) || bytes > kMaxBlob || hook->second >= bytes) {
    result = NULL;
  } else {
    int32_t status = enter_again(hook, start, bytes);
    PyObject *number = status == 0 ? NULL : PyLong_FromLong(status);
    result = Py_None;
    Py_INCREF(result);
    if (number != NULL) {
      Py_DECREF(result);
      result = PyObject_CallMethodObjArgs(hook->owner, name_refuse, number, NULL);
      Py_DECREF(number);
      if (hook->goes_on && hook->structs == NULL) { /* as it was: it may be called again */
        hook->structs = structs;
        hook->held = held;
        return result;
      }
    }
  }
  Py_DECREF(structs);
  Py_DECREF(held);
  return result;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Hook *)self)->held);
  Py_VISIT(((Hook *)self)->owner);
  return 0;
}

static int hook_clear(PyObject *self) {
  Hook *hook = (Hook *)self;
  if (hook->goes_on && hook->structs != NULL && hook->held != NULL) {
    PyObject *kind, *value, *traceback, *result;
    PyErr_Fetch(&kind, &value, &traceback);
    result = PyObject_CallMethodObjArgs(hook->owner, name_let_go, hook->held, NULL);
    if (result == NULL) PyErr_WriteUnraisable(self);
    Py_XDECREF(result);
    PyErr_Restore(kind, value, traceback);
  }
  Py_CLEAR(hook->structs);
  Py_CLEAR(hook->held);
  return 0;
}

static void hook_free(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  PyObject_GC_UnTrack(self);
  hook_clear(self);
  Py_CLEAR(((Hook *)self)->owner);
  release(self);
  Py_DECREF(type);
}

/* `second`: (owner, function or 0, receives, where the second struct lies, goes_on); got's first entry: the structs. */
static PyObject *make_hook(const Site *site, const Given *given, PyObject *got, PyObject *second) {
  Hook *hook = (Hook *)((allocfunc)PyType_GetSlot(hook_type, Py_tp_alloc))(hook_type, 0);
  int i;
  if (hook == NULL) return NULL;
  hook->buffer = site->buffer;
  hook->enter = (EnterFn)(uintptr_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(second, 1));
  hook->receives = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(second, 2));
  hook->second = PyLong_AsLongLong(PyTuple_GetItem(second, 3));
  hook->goes_on = PyObject_IsTrue(PyTuple_GetItem(second, 4));
  hook->owner = PyTuple_GetItem(second, 0);
  Py_XINCREF(hook->owner);
  hook->structs = PyTuple_GetItem(got, 0);
  Py_XINCREF(hook->structs);
  hook->held = PyTuple_New(1 + site->num_tensors);
  if (PyErr_Occurred() || hook->held == NULL) {
    Py_DECREF(hook);
    return NULL;
  }
  Py_INCREF(got);
  PyTuple_SetItem(hook->held, 0, got);
  for (i = 0; i < site->num_tensors; i++) {
    Py_INCREF(given->objects[i]);
    PyTuple_SetItem(hook->held, 1 + i, given->objects[i]);
  }
  return (PyObject *)hook;
}

/* A shape is a tuple (steps, constants): each step pushes an entry of what follow() gave, a tensor of the call, a
 * constant, a new object of a type, or a hook, or makes a tuple of the last ones; deep_ep/_face.py has the same. */
enum { kEntry = 0, kGiven = 1, kThing = 2, kNew = 3, kHook = 4, kTuple = 5, kMaxStack = 16 };

static PyObject *new_object(PyObject *type) {
  return ((allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc))((PyTypeObject *)type, 0);
}

/* `newest`: the last new object, which the result holds. */
static PyObject *shape(const Site *site, const Given *given, PyObject *got, PyObject *how, PyObject **newest) {
  PyObject *stack[kMaxStack], *constants = PyTuple_GetItem(how, 1), *one;
  char *steps;
  Py_ssize_t bytes, i, k;
  int depth = 0;
  if (PyBytes_AsStringAndSize(PyTuple_GetItem(how, 0), &steps, &bytes)) return NULL;
  for (i = 0; i < bytes / 16; i++) {
    int64_t step[2];
    memcpy(step, steps + 16 * i, sizeof step);
    one = NULL;
    switch (step[0]) {
      case kEntry: one = PyTuple_GetItem(got, (Py_ssize_t)step[1]); break;
      case kGiven: one = given->objects[step[1]]; break;
      case kThing: one = PyTuple_GetItem(constants, (Py_ssize_t)step[1]); break;
      default: break;
    }
    if (one != NULL) {
      Py_INCREF(one);
    } else if (step[0] == kNew) {
      PyObject *type = PyTuple_GetItem(constants, (Py_ssize_t)step[1]);
      if (type != NULL) one = *newest = new_object(type);
    } else if (step[0] == kHook) {
      one = make_hook(site, given, got, PyTuple_GetItem(constants, (Py_ssize_t)step[1]));
    } else if (step[0] == kTuple && step[1] <= depth && (one = PyTuple_New((Py_ssize_t)step[1])) != NULL) {
      depth -= (int)step[1];
      for (k = 0; k < step[1]; k++) PyTuple_SetItem(one, k, stack[depth + k]);
    }
    if (one == NULL || depth == kMaxStack) {
      Py_XDECREF(one);
      break;
    }
    stack[depth++] = one;
  }
  if (depth == 1 && i == bytes / 16) return stack[0];
  drop(stack, depth);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a plan's results have no such shape");
  return NULL;
}

/* An EventHandle with these attributes. */
static PyObject *new_handle(PyObject *type, PyObject *const *values) {
  PyObject *handle = new_object(type);
  int i;
  for (i = 0; handle != NULL && i < kHandleAttributes; i++)
    if (PyObject_SetAttr(handle, handle_names[i], values[i]) != 0) Py_CLEAR(handle);
  return handle;
}

/* An EventHandle of a call that was launched: its launch, and the tensors that the communication stream uses. */
static PyObject *make_handle(const Site *site, const Given *given, PyObject *got, PyObject *launch, PyObject *stream) {
  PyObject *handle, *users;
  Py_ssize_t num_made = PyTuple_Size(got), i;
  if ((users = PyTuple_New(site->num_tensors + num_made)) == NULL) return NULL;
  for (i = 0; i < site->num_tensors + num_made; i++) {
    PyObject *one = i < site->num_tensors ? given->objects[i] : PyTuple_GetItem(got, i - site->num_tensors);
    if ((PyObject *)Py_TYPE(one) != tensor_type) one = Py_None; /* a number that was read */
    Py_INCREF(one);
    PyTuple_SetItem(users, i, one);
  }
  {
    PyObject *const values[kHandleAttributes] = {site->core, site->idle, users, stream, Py_None, launch};
    handle = new_handle(site->handle_type, values);
  }
  Py_DECREF(users);
  return handle;
}

/* Looks at the arguments and follows their plan; what `call` returns. With `stream` the call is asynchronous: its event
 * is that of `launch`, under which nothing is left in `kept`, and the new object in its results gets its handle. */
static PyObject *answer(const Site *site, PyObject *launch, PyObject *user, Given *given, PyObject *stream) {
  PyObject *plan, *name, *result = NULL, *modes = NULL, *inference = NULL, *how;
  Writer key;
  key.used = 0;
  key.full = 0;
  if (is_set(num_modes) && (modes = enter_guard(without_modes, NULL)) == NULL) return NULL;
  if (!describe(site, given, &key)) {
    result = nothing();
  } else if ((name = PyBytes_FromStringAndSize((const char *)key.bytes, (Py_ssize_t)key.used)) != NULL) {
    plan = PyDict_GetItemWithError(site->plans, name);
    if (plan == NULL) {
      result = PyErr_Occurred() ? NULL : name;
      Py_XINCREF(result);
    } else if (plan == Py_None) {
      result = nothing();
    } else {
      Py_INCREF(plan); /* what a finalizer runs could clear the plans */
      if (site->ordinary && is_set(in_inference)) inference = enter_guard(inference_guard, Py_False);
      if (!PyErr_Occurred()) result = follow(site, stream == NULL ? launch : Py_None, user, given, plan);
      leave_guard(inference);
      how = PyTuple_GetItem(plan, 2);
      if (result != NULL && PyTuple_Check(result) && how != Py_None) {
        PyObject *got = result, *newest = NULL, *handle;
        result = shape(site, given, got, how, &newest);
        if (result != NULL && newest != NULL && stream != NULL) {
          handle = make_handle(site, given, got, launch, stream);
          if (handle == NULL || PyObject_SetAttr(newest, name_event, handle) != 0) Py_CLEAR(result);
          Py_XDECREF(handle);
        }
        Py_DECREF(got);
      }
      Py_DECREF(plan);
    }
    Py_DECREF(name);
  }
  leave_guard(modes);
  return result;
}

/* call(launch, user, tensors..., scalars..., numbers...): a tuple of what was read and made, or in the plan's shape;
 * a list [status] if the library refused; the key as bytes if there is no plan of it; None if
 * the call is not for this module. `launch`: under which the tensors are kept, or None; `user`: the stream that uses
 * the outputs beside their own, of Core.user_of, or None. */
static PyObject *site_call(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  Site *site = (Site *)self;
  Given given;
  int i, first_number = site->num_tensors + site->num_scalars;
  if (num_args != 2 + first_number + site->num_numbers || (args[1] != Py_None && !PyTuple_Check(args[1]))) {
    PyErr_SetString(PyExc_TypeError, "Site.call: not the arguments that the site was made for");
    return NULL;
  }
  given.objects = args + 2;
  for (i = 0; i < site->num_numbers; i++)
    given.numbers[i] = (int64_t)PyLong_AsUnsignedLongLongMask(given.objects[first_number + i]);
  if (PyErr_Occurred()) return NULL;
  return answer(site, args[0], args[1], &given, NULL);
}

/* Of call_struct in deep_ep/_face.py, behind a site's own numbers. */
enum { kStream = 0, kEvent = 1, kIsAsync = 2, kPrevious = 3, kOfCall = 4 };

/* Numbers of a call that the caller's stream orders: the site's own, the last arguments, then the stream and zeros. The
 * buffer is entered before, if it is not ready or keeps tensors of calls. The stream; NULL: Python's error is set. */
static PyObject *begin(const Site *site, PyObject *const *args, Py_ssize_t num_args, Given *given, int64_t **of_call) {
  PyObject *ready, *stream;
  int first = site->num_tensors + site->num_scalars, own = site->num_numbers - kOfCall, i, is_ready;
  if (own < 0 || num_args != first + own) {
    PyErr_SetString(PyExc_TypeError, "Site: not the arguments that it was made for");
    return NULL;
  }
  if ((ready = PyObject_GetAttr(site->core, name_is_ready)) == NULL) return NULL;
  is_ready = ready == Py_True && PyDict_Size(site->kept) == 0;
  Py_DECREF(ready);
  if (!is_ready) {
    PyObject *entered = PyObject_CallMethodObjArgs(site->core, name_enter_core, NULL);
    if (entered == NULL) return NULL;
    Py_DECREF(entered);
  }
  if ((stream = PyObject_CallNoArgs(site->raw_stream)) == NULL) return NULL;
  given->objects = args;
  for (i = 0; i < own; i++) given->numbers[i] = (int64_t)PyLong_AsUnsignedLongLongMask(args[first + i]);
  *of_call = given->numbers + own;
  (*of_call)[kStream] = (int64_t)PyLong_AsUnsignedLongLongMask(stream);
  (*of_call)[kEvent] = (*of_call)[kIsAsync] = (*of_call)[kPrevious] = 0;
  if (PyErr_Occurred()) Py_CLEAR(stream);
  return stream;
}

/* issue(tensors..., scalars..., numbers...): `call` of a call that the caller's stream alone orders. */
static PyObject *site_issue(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  Given given;
  int64_t *of_call;
  PyObject *stream = begin((Site *)self, args, num_args, &given, &of_call);
  if (stream == NULL) return NULL;
  Py_DECREF(stream);
  return answer((Site *)self, Py_None, Py_None, &given, NULL);
}

/* A launch for an asynchronous call, and its event. NULL: Python's error is set. */
static PyObject *take_launch(const Site *site, int64_t *event) {
  PyObject *launch = NULL, *number;
  Py_ssize_t idle;
  int turn;
  for (*event = 0, turn = 0; turn < 2 && *event == 0; turn++) {
    Py_CLEAR(launch);
    if (turn == 0 && (idle = PyList_Size(site->idle)) > 0) {
      launch = PyList_GetItem(site->idle, idle - 1);
      Py_XINCREF(launch);
      if (launch == NULL || PyList_SetSlice(site->idle, idle - 1, idle, NULL) != 0) break;
    } else { /* there is none, or one without an event */
      launch = PyObject_CallMethodObjArgs(site->core, name_new_launch, NULL);
    }
    if (launch == NULL || (number = PyObject_GetAttr(launch, name_event)) == NULL) break;
    *event = (int64_t)PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) break;
  }
  if (PyErr_Occurred()) Py_CLEAR(launch);
  return launch;
}

/* Makes a call with a launch, which is idle again if nothing was launched. `user`: the stream that uses its outputs. */
static PyObject *answer_later(const Site *site, PyObject *user, Given *given, int64_t *of_call, PyObject *stream) {
  PyObject *launch = take_launch(site, &of_call[kEvent]), *result;
  if (launch == NULL) return NULL;
  of_call[kIsAsync] = 1;
  result = answer(site, launch, user, given, stream);
  if (result != NULL && !PyTuple_Check(result) && PyList_Append(site->idle, launch) != 0) Py_CLEAR(result);
  Py_DECREF(launch);
  return result;
}

/* start(tensors..., scalars..., numbers...): the same asynchronously; the event is in the new object of the plan's
 * shape. */
static PyObject *site_start(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  Given given;
  int64_t *of_call;
  PyObject *stream = begin((Site *)self, args, num_args, &given, &of_call), *result;
  if (stream == NULL) return NULL;
  result = answer_later((Site *)self, Py_None, &given, of_call, stream);
  Py_DECREF(stream);
  return result;
}

static int64_t number_or_zero(PyObject *value) {
  return value == Py_None ? 0 : (int64_t)PyLong_AsUnsignedLongLongMask(value);
}

/* The stream and the previous_event of a call behind an EventHandle or None. An event of the library's is the call's
 * previous_event as it is; with any other Python sees to the order (Core.after). 0: Python's error is set. */
static int follow_event(const Site *site, PyObject *previous, PyObject *stream, int64_t *of_call) {
  PyObject *found;
  if (previous == Py_None) return 1;
  if ((PyObject *)Py_TYPE(previous) == site->handle_type) {
    PyObject *launch = PyObject_GetAttr(previous, name_launch);
    if (launch == NULL) return 0;
    if (launch != Py_None) {
      found = PyObject_GetAttr(launch, name_event);
      Py_DECREF(launch);
      if (found == NULL) return 0;
      of_call[kPrevious] = number_or_zero(found);
      Py_DECREF(found);
      return !PyErr_Occurred();
    }
    Py_DECREF(launch);
  }
  found = PyObject_CallMethodObjArgs(site->core, name_after, previous, stream, NULL);
  if (found == NULL) return 0;
  if (PyTuple_Check(found) && PyTuple_Size(found) == 2) {
    of_call[kStream] = number_or_zero(PyTuple_GetItem(found, 0));
    of_call[kPrevious] = number_or_zero(PyTuple_GetItem(found, 1));
  }
  Py_DECREF(found);
  return !PyErr_Occurred();
}

/* Core.user_of. NULL: Python's error is set. */
static PyObject *user_of(const Site *site, PyObject *stream) {
  PyObject *user = PyDict_GetItemWithError(site->users, stream);
  if (user == NULL && !PyErr_Occurred()) return PyObject_CallMethodObjArgs(site->core, name_user_of, stream, NULL);
  Py_XINCREF(user);
  return user;
}

/* start_behind(previous, tensors..., scalars..., numbers...): the same after an EventHandle or, None, the caller's
 * stream, with outputs in the communication stream's memory. None where this torch has no guard of streams. */
static PyObject *site_start_behind(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  const Site *site = (Site *)self;
  Given given;
  int64_t *of_call;
  StreamGuard guard = NULL;
  PyObject *stream, *user, *result = NULL;
  if (!has_guards() || num_args < 1) Py_RETURN_NONE;
  if ((stream = begin(site, args + 1, num_args - 1, &given, &of_call)) == NULL) return NULL;
  if (follow_event(site, args[0], stream, of_call) && (user = user_of(site, stream)) != NULL) {
    if (torch.enter_stream(site->communication, site->device, &guard) == 0) {
      result = answer_later(site, user, &given, of_call, stream);
      leave_stream(guard);
    } else {
      result = nothing();
    }
    Py_DECREF(user);
  }
  Py_DECREF(stream);
  return result;
}

/* Site(buffer, kept, plans, free_dims, num_scalars, num_numbers, strided, ordinary, core, raw_stream,
 * EventHandle, core.idle, core.users, communication stream, device). */
static PyObject *site_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  unsigned long long buffer, communication;
  PyObject *kept, *plans, *free_dims, *core, *raw_stream, *handle_type, *idle, *users;
  int num_scalars, num_numbers, ordinary, device;
  unsigned int strided;
  Py_ssize_t i, num_tensors;
  Site *site;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  (void)keywords;
  if (!PyArg_ParseTuple(args, "KO!O!O!iiIpOOO!O!O!Ki", &buffer, &PyDict_Type, &kept, &PyDict_Type, &plans,
                        &PyTuple_Type, &free_dims, &num_scalars, &num_numbers, &strided, &ordinary, &core, &raw_stream,
                        &PyType_Type, &handle_type, &PyList_Type, &idle, &PyDict_Type, &users, &communication, &device))
    return NULL;
  num_tensors = PyTuple_Size(free_dims);
  if (num_tensors > kMaxTensors || num_numbers > kMaxNumbers) {
    PyErr_SetString(PyExc_ValueError, "Site: too many arguments");
    return NULL;
  }
  site = (Site *)allocate(type, 0);
  if (site == NULL) return NULL;
  site->buffer = (deepep_buffer_t)(uintptr_t)buffer;
  site->num_tensors = (int)num_tensors;
  site->num_scalars = num_scalars;
  site->num_numbers = num_numbers;
  site->strided = strided;
  site->ordinary = ordinary;
  for (i = 0; i < num_tensors; i++) site->free_dims[i] = (uint32_t)PyLong_AsLong(PyTuple_GetItem(free_dims, i));
  Py_INCREF(kept);
  Py_INCREF(plans);
  Py_INCREF(core);
  Py_INCREF(raw_stream);
  Py_INCREF(handle_type);
  Py_INCREF(idle);
  Py_INCREF(users);
  site->users = users;
  site->communication = (void *)(uintptr_t)communication;
  site->device = device;
  site->handle_type = handle_type;
  site->idle = idle;
  site->kept = kept;
  site->plans = plans;
  site->core = core;
  site->raw_stream = raw_stream;
  return (PyObject *)site;
}

static int site_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Site *)self)->kept);
  Py_VISIT(((Site *)self)->plans);
  Py_VISIT(((Site *)self)->core);
  Py_VISIT(((Site *)self)->raw_stream);
  Py_VISIT(((Site *)self)->handle_type);
  Py_VISIT(((Site *)self)->idle);
  Py_VISIT(((Site *)self)->users);
  return 0;
}

static int site_clear(PyObject *self) {
  Py_CLEAR(((Site *)self)->kept);
  Py_CLEAR(((Site *)self)->plans);
  Py_CLEAR(((Site *)self)->core);
  Py_CLEAR(((Site *)self)->raw_stream);
  Py_CLEAR(((Site *)self)->handle_type);
  Py_CLEAR(((Site *)self)->idle);
  Py_CLEAR(((Site *)self)->users);
  return 0;
}

static void site_free(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  PyObject_GC_UnTrack(self);
  site_clear(self);
  release(self);
  Py_DECREF(type);
}

/* ---- Rows in a memory pool of torch's */

enum { kTorchBlock = 20 << 20 }; /* torch asks a pool for that much, or for up to twice the bytes of the tensor */

/* place_rows(select, room, segment, begin, end, release, device, pool, x, bytes of an element, rows): (a tensor of so
 * many rows like those of x in a torch memory pool over a segment, its place in the segment); None: Python has to see
 * to it. An allocation that fails would have torch's C ABI print an error, so where the segment has no room for one,
 * though the pool may have memory that is free, x's own method allocates, and what it raises is raised. */
static PyObject *place_rows(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
  typedef deepep_status_t (*SelectFn)(void *);
  typedef uint64_t (*RoomFn)(void *);
  SelectFn choose;
  uint64_t room, place;
  char *segment;
  PyObject *device, *pool, *modes = NULL, *begun, *done, *object = NULL, *kind = NULL, *value = NULL, *trace = NULL;
  Seen x;
  Tensor tensor = NULL;
  int64_t sizes[2], strides[2] = {0, 1}, bytes;
  int32_t dtype, type, index;
  int has_room, raised = 0;
  (void)module;
  if (num_args != 11) {
    PyErr_SetString(PyExc_TypeError, "place_rows: 11 arguments");
    return NULL;
  }
  choose = (SelectFn)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[0]);
  segment = (char *)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[2]);
  device = args[6];
  pool = args[7];
  bytes = PyLong_AsLongLong(args[9]);
  sizes[0] = PyLong_AsLongLong(args[10]);
  if (PyErr_Occurred() || bytes <= 0 || !look(args[8], &x) || x.num_dims != 2 || sizes[0] <= 0 ||
      torch.get_dtype(&x.impl, &dtype) || torch.get_device_type(&x.impl, &type) ||
      torch.get_device_index(&x.impl, &index))
    return nothing();
  sizes[1] = strides[0] = x.sizes[1];
  room = ((RoomFn)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[1]))(segment);
  has_room =
      room >= kTorchBlock && (room - kTorchBlock) / 2 / (uint64_t)bytes / (uint64_t)sizes[0] >= (uint64_t)sizes[1];
  if (is_set(num_modes) && (modes = enter_guard(without_modes, NULL)) == NULL) return NULL;
  choose(segment);
  begun = PyObject_CallFunctionObjArgs(args[3], device, pool, NULL);
  if (begun != NULL) {
    if (has_room) {
      if (torch.empty_strided(2, sizes, strides, dtype, type, index, &tensor) == 0) object = to_python(tensor);
      PyErr_Clear();
    } else {
      object = PyObject_CallMethod(args[8], "new_empty", "(LL)", (long long)sizes[0], (long long)sizes[1]);
      raised = object == NULL;
    }
    PyErr_Fetch(&kind, &value, &trace);
    done = PyObject_CallFunctionObjArgs(args[4], device, pool, NULL);
    Py_XDECREF(done);
    if (done != NULL) Py_XDECREF(PyObject_CallFunctionObjArgs(args[5], device, pool, NULL));
    if (PyErr_Occurred()) Py_CLEAR(object);
    Py_DECREF(begun);
  }
  PyErr_Clear(); /* Python comes to the same, and raises it */
  choose(NULL);
  leave_guard(modes);
  if (raised) {
    PyErr_Restore(kind, value, trace);
    return NULL;
  }
  if (object == NULL || !look(object, &x)) {
    Py_XDECREF(object);
    return nothing();
  }
  place = (uint64_t)((char *)x.address - segment);
  return Py_BuildValue("(NK)", object, (unsigned long long)place);
}

/* ---- Module */

/* poll_counts(function, buffer, token, num_local_experts, nanoseconds): (rows, [count of each expert]), or the status.
 * deepep_wait_counts with the GIL held, for a short time: to let go of it may cost a wait for another thread. */
static PyObject *poll_counts(PyObject *module, PyObject *args) {
  typedef deepep_status_t (*WaitFn)(deepep_buffer_t, uint64_t, int64_t, int32_t *, int32_t *);
  unsigned long long function, buffer, token;
  long long limit, passed = 0;
  int num_experts, i;
  int32_t rows = 0, status, *counts;
  struct timespec start, now;
  PyObject *list, *result = NULL;
  (void)module;
  if (!PyArg_ParseTuple(args, "KKKiL", &function, &buffer, &token, &num_experts, &limit)) return NULL;
  counts = PyMem_Malloc((num_experts > 0 ? (size_t)num_experts : 1) * sizeof *counts);
  if (counts == NULL) return PyErr_NoMemory();
  clock_gettime(CLOCK_MONOTONIC, &start);
  do {
    status = ((WaitFn)(uintptr_t)function)((deepep_buffer_t)(uintptr_t)buffer, token, 0, &rows, counts);
    if (status != DEEPEP_PENDING) break;
    clock_gettime(CLOCK_MONOTONIC, &now);
    passed = (now.tv_sec - start.tv_sec) * 1000000000ll + (now.tv_nsec - start.tv_nsec);
  } while (passed < limit);
  if (status != 0) {
    result = PyLong_FromLong(status);
  } else if ((list = PyList_New(num_experts)) != NULL) {
    for (i = 0; i < num_experts; i++) PyList_SetItem(list, i, PyLong_FromLong(counts[i]));
    result = Py_BuildValue("iN", (int)rows, list);
  }
  PyMem_Free(counts);
  return result;
}

/* call_again(function, buffer, structs, second, (offset, value), ...): the status of a call with a copy of the structs
 * that an earlier one has left, the first at 0 and the other at `second`, after 8 bytes were written at each offset. */
static PyObject *call_again(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
  _Alignas(16) unsigned char blob[kMaxBlob];
  char *structs;
  Py_ssize_t bytes, i;
  uint64_t function, buffer;
  int64_t second;
  int right = 1;
  (void)module;
  if (num_args < 4 || num_args % 2) {
    PyErr_SetString(PyExc_TypeError, "call_again: offsets and values come in pairs");
    return NULL;
  }
  if (PyBytes_AsStringAndSize(args[2], &structs, &bytes)) return NULL;
  function = PyLong_AsUnsignedLongLongMask(args[0]);
  buffer = PyLong_AsUnsignedLongLongMask(args[1]);
  second = PyLong_AsLongLong(args[3]);
  right = bytes <= kMaxBlob && second >= 0 && second < bytes;
  if (right) memcpy(blob, structs, (size_t)bytes);
  for (i = 4; right && i < num_args; i += 2) {
    int64_t offset = PyLong_AsLongLong(args[i]);
    uint64_t value = PyLong_AsUnsignedLongLongMask(args[i + 1]);
    right = offset >= 0 && offset + (int64_t)sizeof value <= bytes;
    if (right) memcpy(blob + offset, &value, sizeof value);
  }
  if (PyErr_Occurred()) return NULL;
  if (!right) {
    PyErr_SetString(PyExc_ValueError, "call_again: not the structs of a call");
    return NULL;
  }
  return PyLong_FromLong(((EnterFn)(uintptr_t)function)((deepep_buffer_t)(uintptr_t)buffer, blob, blob + second, NULL));
}

/* of_event(function, event, stream or None): the status of a function of the C API that takes an event and a stream. */
static PyObject *of_event(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
  typedef deepep_status_t (*EventFn)(void *, void *);
  void *given[3] = {NULL, NULL, NULL};
  Py_ssize_t i;
  (void)module;
  if (num_args != 3) {
    PyErr_SetString(PyExc_TypeError, "of_event: 3 arguments");
    return NULL;
  }
  for (i = 0; i < 3; i++)
    if (args[i] != Py_None) given[i] = (void *)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[i]);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromLong(((EventFn)given[0])(given[1], given[2]));
}

/* mark_again(deepep_event_record, idle, raw_stream, EventHandle, EventOverlap, points): an EventOverlap with the
 * present end of the caller's stream, by the event of the last launch of the list. None: Python has to do it, and says
 * why it cannot be done. */
static PyObject *mark_again(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
  typedef deepep_status_t (*EventFn)(void *, void *);
  PyObject *launch, *event = NULL, *stream = NULL, *handle, *overlap = NULL;
  Py_ssize_t idle;
  void *given[2];
  int done = 0;
  (void)module;
  if (num_args != 6 || !PyList_Check(args[1]) || !PyType_Check(args[3]) || !PyType_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "mark_again: a function, a list, a function, two types and an object");
    return NULL;
  }
  if ((idle = PyList_Size(args[1])) == 0) Py_RETURN_NONE;
  launch = PyList_GetItem(args[1], idle - 1);
  Py_INCREF(launch);
  if (PyList_SetSlice(args[1], idle - 1, idle, NULL) == 0 && (event = PyObject_GetAttr(launch, name_event)) != NULL &&
      (stream = PyObject_CallNoArgs(args[2])) != NULL) {
    given[0] = (void *)(uintptr_t)PyLong_AsUnsignedLongLongMask(event);
    given[1] = (void *)(uintptr_t)PyLong_AsUnsignedLongLongMask(stream);
    done = !PyErr_Occurred() && given[0] != NULL &&
           ((EventFn)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[0]))(given[0], given[1]) == 0;
  }
  Py_XDECREF(event);
  Py_XDECREF(stream);
  if (done) {
    PyObject *const values[kHandleAttributes] = {args[5], args[1], Py_None, Py_None, Py_None, launch};
    if ((handle = new_handle(args[3], values)) != NULL && (overlap = new_object(args[4])) != NULL &&
        PyObject_SetAttr(overlap, name_event, handle) != 0)
      Py_CLEAR(overlap);
    Py_XDECREF(handle);
  }
  Py_DECREF(launch);
  return done || PyErr_Occurred() ? overlap : nothing();
}

/* record(tensor, user): torch's allocator learns that a stream uses a tensor, or None. */
static PyObject *record(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
  (void)module;
  if (num_args != 2 || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "record: a tensor and a tuple");
    return NULL;
  }
  if (!record_user(args[0], args[1])) return NULL;
  Py_RETURN_NONE;
}

static PyObject *can_guard(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  return PyBool_FromLong(has_guards());
}

/* inside(stream, device, function, arguments...): what the function returns, called while a CUDA stream is current. */
static PyObject *inside(PyObject *module, PyObject *args) {
  Py_ssize_t num_args = PyTuple_Size(args);
  StreamGuard guard = NULL;
  PyObject *of_function, *result = NULL;
  void *stream;
  int32_t device;
  (void)module;
  if (num_args < 3 || !has_guards()) {
    PyErr_SetString(PyExc_TypeError, "inside: a stream, a device and a function");
    return NULL;
  }
  stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(args, 0));
  device = (int32_t)PyLong_AsLong(PyTuple_GetItem(args, 1));
  if (PyErr_Occurred() || (of_function = PyTuple_GetSlice(args, 3, num_args)) == NULL) return NULL;
  if (torch.enter_stream(stream, device, &guard) == 0) {
    result = PyObject_Call(PyTuple_GetItem(args, 2), of_function, NULL);
    leave_stream(guard);
  } else {
    PyErr_SetString(PyExc_RuntimeError, "torch cannot make the communication stream current");
  }
  Py_DECREF(of_function);
  return result;
}

/* properties(tensor): (dtype, device type, device index) as torch's C ABI numbers them; the data's address; sizes. */
static PyObject *properties(PyObject *module, PyObject *tensor) {
  Seen seen;
  int32_t dtype, type, index;
  (void)module;
  if (!look(tensor, &seen) || torch.get_dtype(&seen.impl, &dtype) || torch.get_device_type(&seen.impl, &type) ||
      torch.get_device_index(&seen.impl, &index))
    return nothing();
  return Py_BuildValue("(iii)KL", (int)dtype, (int)type, (int)index, (unsigned long long)(uintptr_t)seen.address,
                       (long long)(seen.num_dims > 0 ? seen.sizes[seen.num_dims - 1] : -1));
}

/* operator_runs(by): 1 when an operator of torch begins, -1 when it ends. */
static PyObject *operator_runs(PyObject *module, PyObject *by) {
  int number = (int)PyLong_AsLong(by);
  (void)module;
  if (PyErr_Occurred()) return NULL;
  operators += number;
  Py_RETURN_NONE;
}

/* probe(copies): an object made of a handle, for Python to count its holders, with wrap_copies set first. */
static PyObject *probe(PyObject *module, PyObject *copies) {
  const int64_t one = 1;
  Tensor tensor = NULL;
  (void)module;
  wrap_copies = PyObject_IsTrue(copies) == 1;
  if (torch.empty_strided(1, &one, &one, 6 /* float32 */, 0 /* CPU */, -1, &tensor)) Py_RETURN_NONE;
  return to_python(tensor);
}

/* start(addresses of torch's functions in the struct's order, objects of torch in the order of their names). */
static PyObject *start(PyObject *module, PyObject *args) {
  PyObject *addresses, *objects;
  PyObject **places[] = {&tensor_type, &wrap, &num_modes, &without_modes, &in_inference, &inference_guard};
  size_t i, num_functions = sizeof torch / sizeof(void *), num_objects = sizeof places / sizeof *places;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &addresses, &PyTuple_Type, &objects)) return NULL;
  if ((size_t)PyTuple_Size(addresses) != num_functions || (size_t)PyTuple_Size(objects) != num_objects) {
    PyErr_SetString(PyExc_ValueError, "start: another number of functions or objects");
    return NULL;
  }
  for (i = 0; i < num_functions; i++) {
    void *address = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, (Py_ssize_t)i));
    if (PyErr_Occurred()) return NULL;
    memcpy((char *)&torch + i * sizeof address, &address, sizeof address);
  }
  for (i = 0; i < num_objects; i++) {
    Py_XDECREF(*places[i]);
    *places[i] = PyTuple_GetItem(objects, (Py_ssize_t)i);
    Py_INCREF(*places[i]);
  }
  Py_RETURN_NONE;
}

static PyMethodDef site_methods[] = {
    {"call", (PyCFunction)(void (*)(void))site_call, METH_FASTCALL, NULL},
    {"issue", (PyCFunction)(void (*)(void))site_issue, METH_FASTCALL, NULL},
    {"start", (PyCFunction)(void (*)(void))site_start, METH_FASTCALL, NULL},
    {"start_behind", (PyCFunction)(void (*)(void))site_start_behind, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};
static PyType_Slot site_slots[] = {{Py_tp_new, site_new},           {Py_tp_dealloc, site_free},
                                   {Py_tp_traverse, site_traverse}, {Py_tp_clear, site_clear},
                                   {Py_tp_methods, site_methods},   {0, NULL}};
static PyType_Spec site_spec = {"deepep_torch.Site", sizeof(Site), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                site_slots};
static PyType_Slot hook_slots[] = {{Py_tp_call, hook_call},
                                   {Py_tp_dealloc, hook_free},
                                   {Py_tp_traverse, hook_traverse},
                                   {Py_tp_clear, hook_clear},
                                   {0, NULL}};
static PyType_Spec hook_spec = {"deepep_torch.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                hook_slots};
static PyMethodDef functions[] = {{"start", start, METH_VARARGS, NULL},
                                  {"poll_counts", poll_counts, METH_VARARGS, NULL},
                                  {"call_again", (PyCFunction)(void (*)(void))call_again, METH_FASTCALL, NULL},
                                  {"of_event", (PyCFunction)(void (*)(void))of_event, METH_FASTCALL, NULL},
                                  {"mark_again", (PyCFunction)(void (*)(void))mark_again, METH_FASTCALL, NULL},
                                  {"record", (PyCFunction)(void (*)(void))record, METH_FASTCALL, NULL},
                                  {"has_guards", can_guard, METH_NOARGS, NULL},
                                  {"inside", inside, METH_VARARGS, NULL},
                                  {"place_rows", (PyCFunction)(void (*)(void))place_rows, METH_FASTCALL, NULL},
                                  {"operator_runs", operator_runs, METH_O, NULL},
                                  {"probe", probe, METH_O, NULL},
                                  {"properties", properties, METH_O, NULL},
                                  {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "deepep_torch", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_deepep_torch(void) {
  PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&site_spec);
  int i;
  hook_type = (PyTypeObject *)PyType_FromSpec(&hook_spec);
  name_cdata = PyUnicode_InternFromString("_cdata");
  name_enter = PyUnicode_InternFromString("__enter__");
  name_exit = PyUnicode_InternFromString("__exit__");
  name_record_stream = PyUnicode_InternFromString("record_stream");
  name_is_ready = PyUnicode_InternFromString("is_ready");
  name_enter_core = PyUnicode_InternFromString("enter");
  name_run = PyUnicode_InternFromString("run");
  name_refuse = PyUnicode_InternFromString("refuse");
  name_let_go = PyUnicode_InternFromString("let_go");
  name_event = PyUnicode_InternFromString("event");
  name_new_launch = PyUnicode_InternFromString("launch_with_event");
  name_launch = PyUnicode_InternFromString("_launch");
  name_after = PyUnicode_InternFromString("after");
  name_user_of = PyUnicode_InternFromString("user_of");
  name_is_neg = PyUnicode_InternFromString("is_neg");
  for (i = 0; i < kHandleAttributes; i++)
    if ((handle_names[i] = PyUnicode_InternFromString(handle_attributes[i])) == NULL) return NULL;
  if (module == NULL || type == NULL || hook_type == NULL || name_cdata == NULL || name_enter == NULL ||
      name_exit == NULL || name_record_stream == NULL || name_is_ready == NULL || name_enter_core == NULL ||
      name_run == NULL || name_refuse == NULL || name_let_go == NULL || name_event == NULL || name_new_launch == NULL ||
      name_launch == NULL || name_after == NULL || name_user_of == NULL || name_is_neg == NULL ||
      PyModule_AddObject(module, "Site", type) != 0 ||
      PyModule_AddIntConstant(module, "version",
                              DEEPEP_VERSION_MAJOR * 10000 + DEEPEP_VERSION_MINOR * 100 + DEEPEP_VERSION_PATCH) != 0)
    return NULL;
  return module;
}
