// A device of torch's (PrivateUse1) over memory of the CPU, whose every decision is Python's: tests/lagging.
//
// What only C++ can give: storages that torch takes for a device's, an allocator, streams and events that
// autograd asks for (it runs backwards of such tensors on a thread of its own, as CUDA's), and the operators
// that make tensors without touching memory. All others reach `fallback` in Python. Nothing here knows
// what a stream is: streams and events are numbers.

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdint>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;

// What Python does. Each call takes the GIL; none may raise.
struct Calls {
  void* (*allocate)(size_t nbytes, int64_t device);
  void (*free)(void* address);
  int64_t (*current_stream)(int64_t device);
  void (*set_stream)(int64_t device, int64_t stream);
  int64_t (*record)(int64_t stream);
  void (*block)(int64_t event, int64_t stream);
  int64_t (*query)(int64_t event);
  void (*synchronize)(int64_t stream);
  void (*forget)(int64_t event);
  void (*use)(void* address, int64_t stream);
};
Calls calls;

// Calls Python where an exception may be on its way to the caller already: memory is freed as that unwinds.
template <class Function, class... Arguments>
auto ask(Function function, Arguments... arguments) {
  struct Kept {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    Kept() { PyErr_Fetch(&type, &value, &traceback); }
    ~Kept() {
      PyErr_Restore(type, value, traceback);
      PyGILState_Release(state);
    }
  } kept;
  return function(arguments...);
}
thread_local c10::DeviceIndex current_device = 0;
c10::DeviceIndex device_count = 0;

void give_back(void* address) {
  if (address != nullptr) {
    ask(calls.free, address);
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nbytes == 0 ? nullptr : ask(calls.allocate, nbytes, static_cast<int64_t>(current_device));
    TORCH_CHECK_WITH(OutOfMemoryError, nbytes == 0 || address != nullptr, "the lagging device has no ",
                     nbytes, " bytes");
    return {address, address, &give_back, c10::Device(kKind, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "memory of the lagging device is copied outside of any stream");
  }
};
Memory memory;
REGISTER_ALLOCATOR(kKind, &memory)

c10::Stream stream_of(int64_t number, c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kKind, index), number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kKind, current_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kKind, current_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current_device;
    return stream_of(ask(calls.current_stream, index), index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device, device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    ask(calls.set_stream, stream.device_index(), stream.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event != nullptr) {
      ask(calls.forget, reinterpret_cast<int64_t>(*event));
    }
    *event = reinterpret_cast<void*>(ask(calls.record, stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      ask(calls.block, reinterpret_cast<int64_t>(event), stream.id());
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ask(calls.query, reinterpret_cast<int64_t>(event)) != 0;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) {
      ask(calls.forget, reinterpret_cast<int64_t>(event));
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    ask(calls.use, data.get(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override { ask(calls.synchronize, stream.id()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current_device;
    current_device = index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index >= 0 ? exchangeDevice(index) : current_device;
  }
  // A storage that is resized keeps nothing: the engine only resizes to 0 and from 0.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    TORCH_CHECK(nbytes == 0 || impl->nbytes() == 0,
                "a storage of the lagging device grows or shrinks with values in it");
    impl->set_data_ptr_noswap(memory.allocate(nbytes));
    impl->set_nbytes(nbytes);
  }
};

// -- operators that touch no memory

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

void make_room(at::Tensor& self) {
  auto needed =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  make_room(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto& mutable_self = const_cast<at::Tensor&>(self);
  mutable_self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  make_room(mutable_self);
  return self;
}

// -- what Python needs

at::Tensor raw(const at::Tensor& self) {
  // The memory as the CPU sees it, owned by nobody: who uses it knows that it is there.
  auto options = at::TensorOptions().dtype(self.dtype()).device(at::kCPU);
  return at::from_blob(self.data_ptr(), self.sizes(), self.strides(), [](void*) {}, options);
}

void set_data(const at::Tensor& self, const at::Tensor& other) {
  // What `self.data = other` does, without torch's list of the devices to which a tensor may so go: CUDA is
  // on it.
  self.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

TORCH_LIBRARY(lagging, m) {
  m.def("raw(Tensor self) -> Tensor");
  m.def("set_data(Tensor self, Tensor other) -> ()");
}

TORCH_LIBRARY_IMPL(lagging, PrivateUse1, m) { m.impl("raw", &raw); }
TORCH_LIBRARY_IMPL(lagging, CatchAll, m) { m.impl("set_data", &set_data); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
}

}  // namespace

extern "C" void lagging_begin(const Calls* given, int devices) {
  calls = *given;
  device_count = static_cast<c10::DeviceIndex>(devices);
  static Hooks hooks;
  if (!at::isPrivateUse1HooksRegistered()) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
}
