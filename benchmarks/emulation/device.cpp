// A machine with a GPU whose work takes time and gives no values: a device of torch's (PrivateUse1) over
// memory of the CPU. A kernel moves the end of its stream, a copy also that of its copy engine; the host
// sleeps until such an end where CUDA would block it. No function here takes the GIL.
//
// The model has 1/scale of the elements of the real one, and each byte of it counts for `scale` bytes. All
// seconds that come in are those of the machine that is modelled; its clock runs `dilation` times slower than
// ours, so that Python is as many times faster to it.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 256;
constexpr int kResources = 32;       // copy engines, the CPU's memory, drives: machine.py numbers them
constexpr int kQueued = 1024;        // launches that a stream holds before the host waits, as with CUDA
constexpr int64_t kSmall = 4096;     // elements up to which a copy has values
constexpr double kLargeSum = 65536;  // bytes from which a sum gives zeros
constexpr double kMostDebt = 0.02;   // seconds

// -- time

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Returns by how much it came late: a kernel wakes a thread some ten microseconds after its time.
double sleep_until(double time) {
  thread_local bool precise = prctl(PR_SET_TIMERSLACK, 1) == 0;
  (void)precise;
  timespec at;
  at.tv_sec = static_cast<time_t>(time);
  at.tv_nsec = static_cast<long>((time - static_cast<double>(at.tv_sec)) * 1e9);
  while (now() < time && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) != 0) {
  }
  return std::max(0.0, now() - time);
}

void spin(double seconds) {
  double until = now() + seconds;
  while (now() < until) {
  }
}

// -- the machine

struct Machine {
  double scale = 1, dilation = 1;
  double memory_rate = 1;  // of the device, bytes/s
  double launch = 0;       // seconds of the host for each launch
  double kernel = 0;       // seconds that a kernel or a copy takes at least
  double latency = 0;      // seconds from the end of a drive's transfer until the host can know
};
Machine machine;

struct Stream {
  double end = 0, busy = 0, launches = 0;
  double queued[kQueued] = {};  // ends of the last launches
};
struct Resource {
  double rate = 1;
  double end = 0, busy = 0, bytes = 0, uses = 0;
  double debt = 0;  // by how much its users woke late, which their next use makes up for
};
// A time in which the compute stream (number 0) had nothing to do. `waits_for` -1: for the host; else the
// stream whose event it waited for.
struct Gap {
  double begin, end, waits_for;
};

std::mutex guard;  // of all that follows
Stream streams[kStreams];
Resource resources[kResources];
std::vector<Gap> gaps;
bool tracing = false;
std::atomic<int> stream_count{1};
thread_local int current_stream = 0;

// The caller of the next holds the guard.

void note_late_host(const Stream& stream, double at) {
  if (tracing && &stream == &streams[0] && stream.end > 0 && at - stream.end > 1e-6) {
    gaps.push_back({stream.end, at, -1});
  }
}

double use(Resource& resource, double begin, double bytes, double more) {
  double seconds = bytes / resource.rate + more;
  resource.busy += seconds;
  resource.bytes += bytes;
  resource.uses++;
  return resource.end = std::max(begin, resource.end) + seconds * machine.dilation;
}

// The callers of the next do not.

double end_of(int number) {
  std::lock_guard<std::mutex> lock(guard);
  return streams[number].end;
}

// A kernel of so many seconds, at the end of a stream. Waits for room in the stream's queue.
void put_kernel(int number, double seconds) {
  Stream& stream = streams[number];
  double oldest;
  {
    std::lock_guard<std::mutex> lock(guard);
    oldest = stream.queued[static_cast<long>(stream.launches) % kQueued];
  }
  if (oldest > now()) sleep_until(oldest);
  std::lock_guard<std::mutex> lock(guard);
  double at = now();
  if (stream.end < at) {
    note_late_host(stream, at);
    stream.end = at;
  }
  seconds = std::max(machine.kernel, seconds);
  stream.end += seconds * machine.dilation;
  stream.busy += seconds;
  stream.queued[static_cast<long>(stream.launches) % kQueued] = stream.end;
  stream.launches++;
}

// A copy over the link: it begins when its stream and its copy engine are free.
void put_copy(int number, int engine, double bytes) {
  std::lock_guard<std::mutex> lock(guard);
  Stream& stream = streams[number];
  double at = now();
  if (stream.end < at) note_late_host(stream, at);
  stream.end = use(resources[engine], std::max(at, stream.end), bytes, machine.kernel);
}

void block_stream(int number, double until, int of) {
  std::lock_guard<std::mutex> lock(guard);
  Stream& stream = streams[number];
  double at = now();
  if (until <= std::max(at, stream.end)) return;
  if (stream.end < at) note_late_host(stream, at);
  if (tracing && number == 0) gaps.push_back({std::max(stream.end, at), until, static_cast<double>(of)});
  stream.end = until;
}

void launch(int64_t count, double seconds) {
  for (int64_t i = 0; i < count; i++) {
    spin(machine.launch * machine.dilation);
    put_kernel(current_stream, seconds / static_cast<double>(count));
  }
}

// -- memory: blocks are kept by their size, as CUDA's caching allocator does, and never returned

std::mutex memory_guard;
std::unordered_map<size_t, std::vector<void*>> idle_blocks;
std::unordered_map<void*, size_t> block_sizes;

void* take_block(size_t nbytes) {
  size_t size = (nbytes + 511) / 512 * 512;
  std::lock_guard<std::mutex> lock(memory_guard);
  auto& idle = idle_blocks[size];
  if (!idle.empty()) {
    void* block = idle.back();
    idle.pop_back();
    return block;
  }
  void* block = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  block_sizes[block] = size;
  return block;
}

void give_block(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(memory_guard);
  idle_blocks[block_sizes[block]].push_back(block);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* block = nbytes == 0 ? nullptr : take_block(nbytes);
    return {block, block, &give_block, c10::Device(kKind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_block; }
  void copy_data(void*, const void*, size_t) const override {}
};
Memory memory;
REGISTER_ALLOCATOR(kKind, &memory)

// -- what autograd and torch ask of a device

c10::Stream stream_of(int number) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kKind, 0), number); }

struct Event {
  double time;
  int stream;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kKind, 0); }
  c10::Device getDevice() const override { return c10::Device(kKind, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = static_cast<int>(stream.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    int number = static_cast<int>(stream.id());
    *static_cast<Event*>(*event) = {end_of(number), number};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto* of = static_cast<Event*>(event);
    block_stream(static_cast<int>(stream.id()), of->time, of->stream);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || now() >= static_cast<Event*>(event)->time;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream& stream) const override {
    sleep_until(end_of(static_cast<int>(stream.id())));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(memory.allocate(nbytes));
    impl->set_nbytes(nbytes);
  }
};

// -- operators that touch no memory

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
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
  if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
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
  auto& resized = const_cast<at::Tensor&>(self);
  resized.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  make_room(resized);
  return self;
}

void set_data(const at::Tensor& self, const at::Tensor& other) {
  // `self.data = other` without torch's list of the devices to which a tensor may go that way.
  self.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

// -- operators that take time

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kKind; }

// The memory of a tensor as the CPU sees it, owned by nobody.
at::Tensor raw(const at::Tensor& self) {
  auto options = at::TensorOptions().dtype(self.dtype()).device(at::kCPU);
  c10::impl::ExcludeDispatchKeyGuard no(c10::autograd_dispatch_keyset);
  if (self.numel() == 0) return at::empty(self.sizes(), options);
  return at::from_blob(self.data_ptr(), self.sizes(), self.strides(), [](void*) {}, options);
}

at::Tensor made_here(const at::Tensor& values) {
  at::Tensor made = at::detail::empty_strided_generic(values.sizes(), values.strides(), &memory,
                                                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                      values.scalar_type());
  raw(made).copy_(values);
  return made;
}

// Bytes that a copy stands for. Parameters and gradients are bf16, or bytes; there are as many indices, flags
// and figures as in the real model.
double bytes_of(const at::Tensor& tensor) {
  bool scaled = tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kByte;
  return static_cast<double>(tensor.nbytes()) * (scaled ? machine.scale : 1);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  bool from_here = is_here(self), to_here = is_here(target);
  int stream = current_stream;
  if (from_here && to_here) put_kernel(stream, 2 * bytes_of(target) / machine.memory_rate);
  else put_copy(stream, to_here ? 0 : 1, bytes_of(target));
  if (target.numel() <= kSmall || target.scalar_type() == at::kLong) {
    c10::impl::ExcludeDispatchKeyGuard no(c10::autograd_dispatch_keyset);
    auto to = to_here ? raw(target) : target, of = from_here ? raw(self) : self;
    to.copy_(of);
  }
  if (!non_blocking && !(from_here && to_here)) sleep_until(end_of(stream));
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  sleep_until(end_of(current_stream));
  return raw(self).item();
}

// Replaces what is here by the CPU's view of it; returns the bytes of that.
double replace_by_raw(c10::IValue& value) {
  double bytes = 0;
  auto seen = [&bytes](const at::Tensor& tensor) {
    if (!is_here(tensor)) return tensor;
    bytes += static_cast<double>(tensor.nbytes());
    return raw(tensor);
  };
  if (value.isTensor()) {
    value = seen(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorList()) made.push_back(seen(tensor));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      made.push_back(tensor ? std::optional<at::Tensor>(seen(*tensor)) : tensor);
    }
    value = made;
  } else if (value.isDevice()) {
    value = c10::Device(c10::kCPU);
  }
  return bytes;
}

// Any other operator of torch's: one launch that reads and writes its tensors once. The CPU computes its
// values, except of sums over whole parameters.
void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  double began = now(), bytes = 0;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<c10::IValue> given(stack->begin() + static_cast<long>(begin), stack->end());
  for (size_t i = begin; i < stack->size(); i++) bytes += replace_by_raw((*stack)[i]);
  put_kernel(current_stream, bytes * machine.scale / machine.memory_rate);
  bool into_given = schema.overload_name().find("out") != std::string::npos && schema.returns().size() == 1;
  if (bytes > kLargeSum && into_given && given.back().isTensor() && is_here(given.back().toTensor())) {
    raw(given.back().toTensor()).zero_();
    stack->resize(begin);
    stack->push_back(given.back());
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    size_t outputs = schema.returns().size(), first = stack->size() - outputs;
    for (size_t i = 0; i < outputs; i++) {
      auto& value = (*stack)[first + i];
      if (value.isTensor()) {
        const auto* alias = schema.returns()[i].alias_info();
        const c10::IValue* same = nullptr;  // the argument that this operator returns
        for (size_t k = 0; alias != nullptr && alias->isWrite() && k < count; k++) {
          const auto* other = schema.arguments()[k].alias_info();
          if (other != nullptr && other->isWrite() && *other == *alias) same = &given[k];
        }
        if (same != nullptr) {
          at::Tensor made = value.toTensor(), given_one = same->toTensor();
          if (is_here(given_one) && made.sizes() != given_one.sizes()) {  // as `arange`, of an empty tensor
            given_one.resize_(made.sizes());
            raw(given_one).copy_(made);
          }
          value = *same;
        } else if (value.toTensor().defined()) value = made_here(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> made;
        for (const at::Tensor& tensor : value.toTensorList()) made.push_back(made_here(tensor));
        value = made;
      }
    }
  }
  spin(std::max(0.0, began + machine.launch * machine.dilation - now()));
}

// -- layers of a model: nodes of autograd that launch kernels and save what a real layer saves

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSaveA = 1, kSaveB = 2, kSaveC = 4, kSaveOne = 8, kSaveTwo = 16;

struct Layer : torch::autograd::Function<Layer> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& a, const std::optional<at::Tensor>& b,
                            const std::optional<at::Tensor>& c, int64_t width, int64_t saves, double seconds,
                            double backward_seconds, int64_t launches, int64_t backward_launches) {
    launch(launches, seconds);
    at::Tensor out;
    if (width < 0) {  // a loss
      out = at::empty({}, a.options());
      raw(out).fill_(1.0);
    } else {
      auto shape = a.sizes().vec();
      if (width > 0 && a.scalar_type() == at::kLong) shape.push_back(width);
      else if (width > 0) shape.back() = width;
      out = at::empty(shape, a.options().dtype(at::kBFloat16));
    }
    variable_list saved;
    if (saves & kSaveA) saved.push_back(a);
    if ((saves & kSaveB) && b) saved.push_back(*b);
    if ((saves & kSaveC) && c) saved.push_back(*c);
    int64_t statistics = ((saves & kSaveOne) ? 1 : 0) + ((saves & kSaveTwo) ? 2 : 0);
    for (int64_t i = 0; i < statistics; i++) saved.push_back(at::empty({4}, a.options().dtype(at::kFloat)));
    context->save_for_backward(saved);
    auto& data = context->saved_data;
    data["seconds"] = backward_seconds;
    data["launches"] = backward_launches;
    std::optional<at::Tensor> inputs[] = {a, b, c};
    for (int i = 0; i < 3; i++) {
      bool wanted = inputs[i] && inputs[i]->is_floating_point() && inputs[i]->requires_grad();
      data[kWanted[i]] = wanted;
      if (wanted) data[kShapes[i]] = inputs[i]->sizes().vec();
    }
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    launch(data["launches"].toInt(), data["seconds"].toDouble());
    auto options = at::TensorOptions().dtype(at::kBFloat16).device(c10::Device(kKind, 0));
    variable_list gradients(9);  // one for each argument of forward
    for (int i = 0; i < 3; i++) {
      if (data[kWanted[i]].toBool()) gradients[i] = at::empty(data[kShapes[i]].toIntVector(), options);
    }
    return gradients;
  }

  static constexpr const char* kWanted[] = {"a", "b", "c"};
  static constexpr const char* kShapes[] = {"shape of a", "shape of b", "shape of c"};
};

at::Tensor layer(const at::Tensor& a, const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& c,
                 int64_t width, int64_t saves, double seconds, double backward_seconds, int64_t launches,
                 int64_t backward_launches) {
  return Layer::apply(a, b, c, width, saves, seconds, backward_seconds, launches, backward_launches);
}

void host_work(int64_t operators) {
  for (int64_t i = 0; i < operators; i++) spin(machine.launch * machine.dilation);
}

TORCH_LIBRARY(emulated, m) {
  m.def("set_data(Tensor self, Tensor other) -> ()");
  m.def(
      "layer(Tensor a, Tensor? b, Tensor? c, int width, int saves, float seconds, float backward_seconds, "
      "int launches, int backward_launches) -> Tensor",
      &layer);
  m.def("host_work(int operators) -> ()", &host_work);
  m.def("kernels(int count, float seconds) -> ()", &launch);
}

TORCH_LIBRARY_IMPL(emulated, CatchAll, m) { m.impl("set_data", &set_data); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

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
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
}

}  // namespace

// -- for machine.py. Times are seconds of CLOCK_MONOTONIC.

extern "C" {

void emulated_begin() {
  static Hooks hooks;
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
}

void emulated_configure(double scale, double memory_rate, double launch_seconds, double kernel,
                        double latency) {
  std::lock_guard<std::mutex> lock(guard);
  machine = {scale, machine.dilation, memory_rate, launch_seconds, kernel, latency};
}

void emulated_rate(int resource, double rate) {
  std::lock_guard<std::mutex> lock(guard);
  resources[resource].rate = rate;
}

void emulated_dilate(double dilation) {
  std::lock_guard<std::mutex> lock(guard);
  machine.dilation = dilation;
}

int emulated_new_stream() { return stream_count++; }
int emulated_current() { return current_stream; }
void emulated_set_current(int stream) { current_stream = stream; }
double emulated_end(int stream) { return end_of(stream); }
void emulated_block(int stream, double until, int of) { block_stream(stream, until, of); }
void emulated_sleep_until(double time) {
  if (now() < time) sleep_until(time);
}

// The calling thread moves so many bytes, which is over when this returns.
void emulated_work(int resource, double bytes) {
  Resource& of = resources[resource];
  double end;
  {
    std::lock_guard<std::mutex> lock(guard);
    double paid = std::min(of.debt, bytes / of.rate * machine.dilation);
    of.debt -= paid;
    end = of.end = use(of, now(), bytes, 0) - paid;
  }
  double late = now() < end ? sleep_until(end) : 0;
  if (late > 0) {
    std::lock_guard<std::mutex> lock(guard);
    of.debt += std::min(late, kMostDebt);
  }
}

// The calling thread computes for so long, beside all others.
void emulated_compute(double seconds) {
  thread_local double debt = 0;
  seconds *= machine.dilation;
  double paid = std::min(debt, seconds);
  debt -= paid;
  if (seconds > paid) debt += std::min(kMostDebt, sleep_until(now() + seconds - paid));
}

// A drive moves so many bytes, behind what it has been given before; returns when the host can know.
double emulated_transfer(int resource, double bytes) {
  std::lock_guard<std::mutex> lock(guard);
  return use(resources[resource], now(), bytes, 0) + machine.latency * machine.dilation;
}

// Of the compute stream: seconds and launches; then, of each resource: seconds, bytes and uses. So far.
void emulated_counts(double* out) {
  std::lock_guard<std::mutex> lock(guard);
  *out++ = streams[0].busy;
  *out++ = streams[0].launches;
  for (const Resource& resource : resources) {
    *out++ = resource.busy;
    *out++ = resource.bytes;
    *out++ = resource.uses;
  }
}

void emulated_trace(int on) {
  std::lock_guard<std::mutex> lock(guard);
  tracing = on != 0;
  if (tracing) gaps.clear();
}

// Writes at most `most` gaps, of three numbers each; returns how many there are.
long emulated_gaps(double* out, long most) {
  std::lock_guard<std::mutex> lock(guard);
  long count = static_cast<long>(gaps.size());
  for (long i = 0; i < std::min(most, count); i++) {
    *out++ = gaps[i].begin;
    *out++ = gaps[i].end;
    *out++ = gaps[i].waits_for;
  }
  return count;
}

}  // extern "C"
